"""Tensors on simulated devices behave as on any other device, in every mode."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def on(device, module, *args):
    """The module's output on a device, brought to the host."""
    moved = copy.deepcopy(module).to(device)
    output = moved(*(a.to(device) for a in args))
    assert output.device == torch.device(device)
    return output.cpu()


def test_a_round_trip_gives_the_same_values(x):
    for device in ("sim:0", "sim:1"):
        assert torch.equal(x.to(device).cpu(), x)
    assert torch.equal(x.to("sim:0").to("sim:1").cpu(), x)
    assert torch.zeros(2, device="sim").device == torch.device("sim:0")
    assert x.to("sim:0").is_sim


def test_dtypes_change_on_the_way_and_there(x):
    assert torch.equal(x.to("sim:0", torch.float16).cpu(), x.half())
    assert torch.equal(x.to("sim:0").half().cpu(), x.half())
    a = x.to("sim:0").bfloat16()
    assert torch.equal((a @ a.t()).cpu(), x.bfloat16() @ x.bfloat16().t())


def test_tensors_of_different_devices_do_not_mix(x):
    a, b = x.to("sim:0"), x.to("sim:1")
    for mixed in (
        lambda: a + b,
        lambda: a + x,
        lambda: a @ b.t(),
        lambda: a @ x.t(),
        lambda: torch.cat([a, b]),
        lambda: nn.functional.embedding(torch.tensor([1]), a),
    ):
        with pytest.raises(RuntimeError, match="at least two devices"):
            mixed()


def test_host_scalars_and_host_indices_are_allowed(x):
    a = x.to("sim:0")
    assert torch.equal((a * torch.tensor(2.0)).cpu(), x * 2)
    assert torch.equal(a[torch.tensor([0, 1])].cpu(), x[[0, 1]])


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(8, 8), lambda x: (x,)),
        (nn.LayerNorm(8), lambda x: (x,)),
        (nn.GroupNorm(2, 8), lambda x: (x,)),
        (nn.Embedding(10, 8), lambda x: (torch.arange(5),)),
        (nn.Conv2d(1, 4, 3, padding=1), lambda x: (x.view(1, 1, 4, 8),)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_are_bit_equal_to_the_host(module, inputs, x):
    for device in ("sim:0", "sim:1"):
        assert torch.equal(on(device, module, *inputs(x)), module(*inputs(x)))


def test_attention_is_close_to_the_host():
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    attention = nn.functional.scaled_dot_product_attention
    d = q.to("sim:1")
    torch.testing.assert_close(
        attention(d, d, d, is_causal=True).cpu(), attention(q, q, q, is_causal=True)
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_networks_run_and_train(kind, bias):
    torch.manual_seed(0)
    host = kind(5, 6, num_layers=2, bidirectional=True, bias=bias)
    device = copy.deepcopy(host).to("sim:1")
    x = torch.randn(3, 2, 5)
    want, got = host(x)[0], device(x.to("sim:1"))[0]
    torch.testing.assert_close(got.cpu(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_have_second_derivatives(cell):
    torch.manual_seed(0)
    module = cell(3, 4)

    def second(module, x):
        x = x.detach().requires_grad_()
        out = module(x)
        out = out[1] if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x = torch.randn(2, 3)
    got = second(copy.deepcopy(module).to("sim:0"), x.to("sim:0"))
    torch.testing.assert_close(got.cpu(), second(module, x))


def test_backward_crosses_devices(x):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
    split = copy.deepcopy(host)
    split[:2].to("sim:0")
    split[2:].to("sim:1")
    host(x).sum().backward()
    split[2:](split[:2](x.to("sim:0")).to("sim:1")).sum().backward()
    for p, q in zip(host.parameters(), split.parameters(), strict=True):
        assert torch.equal(q.grad.cpu(), p.grad)
    assert split[3].weight.grad.device == torch.device("sim:1")


def test_recomputed_blocks_drop_the_same_elements():
    x = torch.ones(64, device="sim:1", requires_grad=True)
    y = checkpoint(lambda t: nn.functional.dropout(t, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_autocast_picks_the_precision_by_operator(x):
    linear = nn.Linear(8, 8).to("sim:0")
    with torch.autocast("sim", dtype=torch.bfloat16):
        low = linear(x.to("sim:0"))
        assert low.dtype == torch.bfloat16
        assert low.softmax(-1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to"):
            nn.functional.binary_cross_entropy(low.sigmoid(), low.sigmoid())
    assert linear(x.to("sim:0")).dtype == torch.float32


def test_training_steps_equal_the_host(x):
    torch.manual_seed(0)
    host = nn.Linear(8, 4)
    device = copy.deepcopy(host).to("sim:1")
    for module, data in ((host, x), (device, x.to("sim:1"))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(data).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(device.weight.cpu(), host.weight)


def test_gradient_scaling_works():
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    weight = nn.Parameter(torch.ones(2, device="sim:0"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_results_whose_shape_is_data(x):
    a = x.to("sim:0")
    assert torch.equal((a > 0).nonzero().cpu(), (x > 0).nonzero())
    assert torch.equal(a[a > 0].cpu(), x[x > 0])
    assert torch.tensor([1, 2, 2], device="sim:0").unique().tolist() == [1, 2]
    assert a.sum().item() == x.sum().item()
    assert "device='sim:0'" in repr(a)


def test_views_share_memory(x):
    a = x.to("sim:0").clone()
    a.view(-1)[3:9].zero_()
    want = x.clone()
    want.view(-1)[3:9].zero_()
    assert torch.equal(a.cpu(), want)
    assert torch.equal(a.t()[1:].unfold(0, 2, 1).cpu(), want.t()[1:].unfold(0, 2, 1))


def test_in_place_and_in_memory_order_of_their_own():
    x = torch.randn(2, 3, 4, 4)
    permuted = x.permute(1, 0, 3, 2).contiguous().to("sim:0").permute(1, 0, 3, 2)
    assert torch.equal(permuted.tril_(1).cpu(), x.tril(1))
    images = x.contiguous(memory_format=torch.channels_last).to("sim:0")
    padded = nn.functional.pad(images, (1, 2, 0, 1), mode="replicate")
    assert torch.equal(padded.cpu(), nn.functional.pad(x, (1, 2, 0, 1), mode="replicate"))


def test_overlapping_copies_within_a_device():
    a = torch.arange(6.0, device="sim:0")
    a[0:3].copy_(a[3:6])
    assert a.tolist() == [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]


def test_out_arguments_and_resizing(x):
    a = x.to("sim:0")
    assert torch.equal(torch.add(a, a, out=torch.empty(0, device="sim:0")).cpu(), x + x)
    assert torch.equal(torch.add(a, a, out=torch.empty(4, 8, device="sim:0")).cpu(), x + x)
    assert torch.ones(2, device="sim:0").resize_(4)[:2].tolist() == [1.0, 1.0]
    view = torch.empty(0, device="sim:0").set_(a.untyped_storage(), 0, (2, 2), (2, 1))
    assert torch.equal(view.cpu(), x.view(-1)[:4].view(2, 2))


def test_storages_know_their_device(x):
    storage = x.to("sim:1").untyped_storage()
    assert storage.device == torch.device("sim:1")
    assert storage.nbytes() == storage.cpu().nbytes() == x.nbytes


def test_parameters_take_data_of_another_device(x):
    parameter = nn.Parameter(x.to("sim:0"))
    parameter.data = x.to("sim:1")
    assert parameter.device == torch.device("sim:1")
    assert nn.Linear(3, 3, device="meta").to_empty(device="sim:1").weight.device.index == 1


def test_deepcopy_save_and_load(x):
    b = x.to("sim:1")
    assert copy.deepcopy(b).device == b.device
    file = io.BytesIO()
    torch.save({"b": b}, file)
    for location, want in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)["b"]
        assert loaded.device == torch.device(want)
        assert torch.equal(loaded.cpu(), x)


def test_what_no_device_allows_is_refused(x):
    a = x.to("sim:0")
    with pytest.raises(TypeError, match="numpy"):
        a.numpy()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        a.pin_memory()
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.zeros(1, device="sim:7")


def test_inference_mode_and_an_uncompiled_graph(x):
    a = x.to("sim:0")
    with torch.inference_mode():
        assert torch.equal((a @ a.t()).cpu(), x @ x.t())


def test_random_numbers_are_those_of_the_host():
    want = torch.rand(2, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator("sim:0").manual_seed(1)
    assert torch.equal(torch.rand(2, device="sim:0", generator=generator).cpu(), want)
    torch.manual_seed(3)
    first = torch.randn(3, device="sim:1").tolist()
    torch.manual_seed(3)
    assert torch.randn(3, device="sim:1").tolist() == first
    assert torch.randn(3, device="sim:1").tolist() != first


def test_generator_states_are_read_and_put_back():
    torch.sim.manual_seed_all(5)
    state = torch.sim.get_rng_state("sim:1")
    first = torch.nn.functional.dropout(torch.ones(64, device="sim:1")).tolist()
    torch.sim.set_rng_state(state, "sim:1")
    assert torch.nn.functional.dropout(torch.ones(64, device="sim:1")).tolist() == first
    with torch.random.fork_rng([0, 1], device_type="sim"):
        torch.rand(1, device="sim:1")
        inside = torch.sim.get_rng_state(1)
    assert not torch.equal(inside, torch.sim.get_rng_state(1))
