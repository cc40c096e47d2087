"""Ranks for `test_megatron.py`: Megatron-core's own code against the plain loop, in one launch."""

from __future__ import annotations

import traceback
import warnings

import torch
from torch.utils.data import DataLoader

BATCH, STEPS, LENGTH, WORDS = 4, 3, 8, 32

#: By name: the family, the plugin's arguments, and what else differs from the plain run.
CASES = {
    "sequence": (
        "qwen2",
        {
            "tp_degree": 2,
            "sequence_parallelism": True,
            "recompute_activations": True,
            "gradient_clipping": 0.5,
        },
        {},
    ),
    # With Adam, a key's bias of GPT-2 moves by noise alone: its gradient is zero but for rounding.
    "pp": (
        "gpt2",
        {"pp_degree": 2, "num_micro_batches": 2, "return_logits": True},
        {"optimizer": "sgd"},
    ),
    "dp": (
        "llama",
        {"use_distributed_optimizer": True, "num_micro_batches": 2},
        {"accumulation": 2, "clip": 0.5},
    ),
    "tied": (
        "mistral",
        {
            "pp_degree": 2,
            "calculate_per_token_loss": True,
            "attention_softmax_in_fp32": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"padding": True, "optimizer": "adam"},
    ),
    "tokens": (
        "llama",
        {"calculate_per_token_loss": True, "num_micro_batches": 2},
        {"padding": True, "optimizer": "sgd"},
    ),
}
#: What has no plain loop of its own to be equal to.
OTHERS = {
    "bf16": (
        "llama",
        {"tp_degree": 2, "sequence_parallelism": True, "gradient_clipping": 1.0},
        {"precision": "bf16"},
    ),
    "bf16, divided": ("llama", {"use_distributed_optimizer": True}, {"precision": "bf16"}),
    "dropout": (
        "gpt2",
        {"tp_degree": 2, "hidden_dropout": 0.2, "attention_dropout": 0.2},
        {"optimizer": "sgd"},
    ),
}
#: Those that another device goes through.
FEW = ("sequence", "pp", "bf16, divided")
#: What needs four: all degrees at once.
FOUR = {
    "all": (
        "llama",
        {
            "tp_degree": 2,
            "pp_degree": 2,
            "num_micro_batches": 2,
            "sequence_parallelism": True,
            "decoder_last_pipeline_num_layers": 1,
        },
        {},
    ),
    "tp+dp": ("qwen2", {"tp_degree": 2, "use_distributed_optimizer": True}, {"groups": True}),
}


def make_model(family, layers=2):
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "initializer_range": 0.2}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16,
            n_layer=layers,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        return transformers.GPT2LMHeadModel(config)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[family]
    more = {"sliding_window": None} if family == "mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=family == "mistral",
        **common,
        **more,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def make_optimizer(model, changes):
    if changes.get("optimizer") == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if changes.get("optimizer") == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    if changes.get("groups"):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def make_samples(number, changes):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (number, LENGTH), generator=draw)
    samples = []
    for row in range(number):
        labels, mask = ids[row].clone(), torch.ones(LENGTH, dtype=torch.long)
        if changes.get("padding"):
            end = 3 + row % (LENGTH - 3)
            labels[end:], mask[end:] = -100, 0
        samples.append({"input_ids": ids[row], "labels": labels, "attention_mask": mask})
    return samples


def plain_run(model, changes, size, steps=STEPS):
    """Losses of the plain loop over batches of all data-parallel processes together."""
    optimizer = make_optimizer(model, changes)
    accumulation = changes.get("accumulation", 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    samples = make_samples(steps * accumulation * BATCH * size, changes)
    losses = []
    model.train()
    for number in range(steps):
        each = []
        for part in range(accumulation):
            at = (number * accumulation + part) * BATCH * size
            chosen = samples[at : at + BATCH * size]
            loss = model(**{k: torch.stack([s[k] for s in chosen]) for k in chosen[0]}).loss
            (loss / accumulation).backward()
            each.append(loss.item())
        norm = changes.get("clip") or changes.get("gradient_clipping")
        if norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(each)
    return losses


def fresh():
    from anydevice.training import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def prepared(case, cpu=True):
    from anydevice import MegatronLMPlugin
    from anydevice.training import Accelerator

    family, arguments, changes = case
    fresh()
    accelerator = Accelerator(
        cpu=cpu,
        megatron_lm_plugin=MegatronLMPlugin(**arguments),
        gradient_accumulation_steps=changes.get("accumulation", 1),
        scheduler_unit="steps",
        mixed_precision=changes.get("precision", "no"),
    )
    model = make_model(family, 3 if "decoder_last_pipeline_num_layers" in arguments else 2)
    model.train()
    optimizer = make_optimizer(model, changes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    size = accelerator.torch_device_mesh["dp_replicate"].size()
    loader = DataLoader(
        make_samples(STEPS * changes.get("accumulation", 1) * BATCH * size, changes), BATCH
    )
    return accelerator, accelerator.prepare(model, optimizer, scheduler, loader)


def megatron_run(case, accelerator, things, stop=STEPS, skip=0):
    model, optimizer, scheduler, loader = things
    changes = case[2]
    losses, each = [], []
    if skip:
        loader = accelerator.skip_first_batches(loader, skip * changes.get("accumulation", 1))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if changes.get("clip"):
                accelerator.clip_grad_norm_(model.parameters(), changes["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        each.append(loss.item())
        if accelerator.sync_gradients:
            losses.append(each)
            each = []
        if len(losses) == stop:
            break
    return losses


def compare(case, cpu, folder):
    """The case against the plain loop, and a resumed run against one that went on."""
    accelerator, things = prepared(case, cpu)
    torch.manual_seed(5)
    losses = megatron_run(case, accelerator, things, stop=1)
    accelerator.save_state(folder)
    losses += megatron_run(case, accelerator, things, skip=1)
    state = accelerator.get_state_dict(things[0])
    same_everywhere(things[0])
    if case in (*CASES.values(), *FOUR.values()):
        against_plain(case, accelerator, losses, state)
    again, others = prepared(case, cpu)
    again.load_state(folder)
    resumed = megatron_run(case, again, others, skip=1)
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(losses[1:]), atol=0, rtol=0)
    same_state(again, again.get_state_dict(others[0]), state, exact=True)


def against_plain(case, accelerator, losses, state):
    family, arguments, changes = case
    size = accelerator.torch_device_mesh["dp_replicate"].size()
    means = torch.tensor(losses).mean(1).to(accelerator.device)
    means = accelerator.reduce(means, "mean").cpu()
    plain = make_model(family, 3 if "decoder_last_pipeline_num_layers" in arguments else 2)
    expected = torch.tensor(plain_run(plain, {**arguments, **changes}, size)).mean(1)
    if not (changes.get("padding") and size > 1):  # there, each has a mean over its own tokens
        torch.testing.assert_close(means, expected, atol=2e-5, rtol=2e-5)
    same_state(accelerator, state, plain.state_dict())


def same_everywhere(model):
    """Weights that several processes have whole are equal on them."""
    from megatron.core import parallel_state

    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ):
        for name, parameter in model.named_parameters():
            divided = getattr(parameter, "tensor_model_parallel", False)
            if divided and group is parallel_state.get_tensor_model_parallel_group():
                continue
            first = parameter.detach().clone()
            torch.distributed.broadcast(
                first, torch.distributed.get_global_rank(group, 0), group=group
            )
            assert torch.equal(first, parameter), name


def same_state(accelerator, state, expected, exact=False):
    if not accelerator.is_main_process:
        assert state == {}
        return
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        close = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(state[name], tensor, **close, msg=lambda m, n=name: f"{n}: {m}")


def all_cases(rank, size, cpu, folder, only=None):
    """The cases that were not as they must be, with their tracebacks."""
    failed = {}
    for name, case in (FOUR if size == 4 else {**CASES, **OTHERS}).items():
        if only and name not in only:
            continue
        try:
            compare(case, cpu, f"{folder}/{name}")
        except Exception:  # noqa: BLE001 - it is the result
            failed[name] = traceback.format_exc()
            break  # the others may wait for this rank
    return failed


def other_layouts(rank, size, folder):
    """A checkpoint of one layout is read by others, and by another engine."""
    case = ("llama", {"tp_degree": 2}, {})
    accelerator, things = prepared(case)
    megatron_run(case, accelerator, things, stop=1)
    accelerator.save_state(folder)
    losses = torch.tensor(megatron_run(case, accelerator, things, skip=1)).flatten()
    state = accelerator.get_state_dict(things[0])
    whole = [state]
    torch.distributed.broadcast_object_list(whole, 0)
    for arguments in ({"pp_degree": 2}, {"tp_degree": 2, "use_distributed_optimizer": True}):
        other = ("llama", arguments, {})
        accelerator, things = prepared(other)
        accelerator.load_state(folder)
        resumed = torch.tensor(megatron_run(other, accelerator, things, skip=1)).flatten()
        torch.testing.assert_close(resumed, losses, atol=2e-5, rtol=2e-5)
        same_state(accelerator, accelerator.get_state_dict(things[0]), state)
    return plain_engine(folder, losses)


def plain_engine(folder, losses):
    from anydevice.training import Accelerator

    fresh()
    accelerator = Accelerator(cpu=True, scheduler_unit="steps")
    model = make_model("llama")
    optimizer = make_optimizer(model, {})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(folder)
    samples = make_samples(STEPS * BATCH, {})[BATCH:]
    for number, expected in enumerate(losses.tolist()):
        chosen = samples[number * BATCH : (number + 1) * BATCH]
        loss = model(**{k: torch.stack([s[k] for s in chosen]) for k in chosen[0]}).loss
        assert abs(loss.item() - expected) < 2e-5, number
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return True


def trained(arguments, family="llama", steps=1, **changes):
    """A case after some steps: the accelerator, the prepared things, and what Megatron has."""
    case = (family, arguments, changes)
    accelerator, things = prepared(case)
    losses = megatron_run(case, accelerator, things, stop=steps) if steps else []
    return accelerator, things, things[0].running, losses


def raised(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def effects(rank, size, folder):
    """What each field that has an effect does to Megatron's own objects."""
    seen = {}
    running = trained({"tp_degree": 2}, steps=0)[2]
    seen["tp_degree"] = running.module.decoder.layers[0].mlp.linear_fc2.weight.shape[1]
    running = trained({"pp_degree": 2}, steps=0)[2]
    seen["pp_degree"] = len(running.module.decoder.layers)
    arguments = {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1}
    running = trained(arguments, steps=0)[2]
    seen["decoder_last_pipeline_num_layers"] = len(running.module.decoder.layers)
    accelerator, things, _, _ = trained({"tp_degree": 2}, steps=0)
    ids = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in things[3]]
    wanted = torch.stack([sample["input_ids"] for sample in make_samples(STEPS * BATCH, {})])
    seen["samples are gathered once"] = torch.equal(torch.cat(ids), wanted)
    _, things, running, _ = trained(
        {"num_micro_batches": 4, "recompute_activations": True, "attention_softmax_in_fp32": True},
        steps=0,
    )
    calls = []
    running.module.register_forward_pre_hook(lambda *args: calls.append(1))
    things[0](**next(iter(things[3])))
    seen["num_micro_batches"] = len(calls)
    seen["recompute_activations"] = running.module.config.recompute_granularity
    seen["attention_softmax_in_fp32"] = running.module.config.attention_softmax_in_fp32
    full = {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
        "tp_degree": 2,
        "sequence_parallelism": True,
        "attention_dropout": 0.25,
        "hidden_dropout": 0.125,
    }
    config = trained(full, steps=0)[2].module.config
    seen |= {
        name: getattr(config, name)
        for name in full
        if name not in ("tp_degree", "sequence_parallelism")
    }
    seen["sequence_parallelism"] = config.sequence_parallel
    _, things, running, _ = trained(
        {
            "use_distributed_optimizer": True,
            "gradient_clipping": 0.5,
            "other_megatron_args": {"check_for_nan_in_grad": True},
        },
        steps=0,
    )
    (made,) = things[1].optimizer._parts()
    seen["use_distributed_optimizer"] = type(made).__name__
    seen["gradient_clipping"] = made.config.clip_grad
    seen["other_megatron_args"] = running.ddp_config.check_for_nan_in_grad
    return seen | losses_seen(folder)


def losses_seen(folder):
    """What fields do to losses, and to checkpoints."""
    seen = {}
    arguments = {"eod_mask_loss": True, "return_logits": True, "seq_length": LENGTH - 1}
    _, things, _, _ = trained(arguments, steps=0)
    model, batch = things[0], next(iter(things[3]))
    seen["seq_length"] = raised(lambda: model(**batch))
    short = {name: value[:, : LENGTH - 1] for name, value in batch.items()}
    model.config.eos_token_id = int(short["input_ids"][0, 1])
    found = model(**short)
    labels = short["labels"].clone()
    labels[:, 1:][short["input_ids"][:, :-1] == model.config.eos_token_id] = -100
    plain = make_model("llama")
    with torch.no_grad():
        expected = plain(input_ids=short["input_ids"], labels=labels)
        whole = plain(**short)
    seen["eod_mask_loss"] = (
        abs(found.loss.item() - expected.loss.item()) < 1e-5
        and abs(whole.loss.item() - expected.loss.item()) > 1e-3
    )
    seen["return_logits"] = (found.logits - whole.logits).abs().max().item() < 1e-5
    seen["calculate_per_token_loss"] = token_mean()
    accelerator, _, _, _ = trained({"no_save_optim": True})
    accelerator.save_state(f"{folder}/without")
    saved = torch.load(f"{folder}/without/optimizer.bin", weights_only=True)
    seen["no_save_optim"] = len(saved["state"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator, _, _, _ = trained({})
    seen["schedulers warn"] = any("lr_scheduler" in str(each.message) for each in told)
    accelerator.save_state(f"{folder}/with")
    accelerator, things, _, _ = trained({"no_load_optim": True}, steps=0)
    accelerator.load_state(f"{folder}/with")
    seen["no_load_optim"] = things[1].optimizer.steps()
    return seen


def token_mean():
    """Whether the loss is the mean over the tokens of all micro-batches."""
    arguments = {"calculate_per_token_loss": True, "num_micro_batches": 2}
    _, things, _, losses = trained(arguments, padding=True)
    batch = next(iter(things[3]))
    with torch.no_grad():
        return abs(make_model("llama")(**batch).loss.item() - losses[0][0]) < 1e-5


def refusals(rank, size):
    """What cannot be done, with its error, for each case by name."""
    seen = {}

    def start(arguments, family="llama", change=None, steps=0, **more):
        def run():
            fresh()
            case = (family, arguments, more)
            if change is None:
                accelerator, things = prepared(case)
                return megatron_run(case, accelerator, things, stop=steps) if steps else None
            from anydevice import MegatronLMPlugin
            from anydevice.training import Accelerator

            accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**arguments))
            return change(accelerator, make_model(family))

        return raised(run)

    def with_config(**values):
        def change(accelerator, model):
            for name, value in values.items():
                setattr(model.config, name, value)
            return accelerator.prepare(model, make_optimizer(model, {}))

        return change

    seen["processes"] = start({"tp_degree": 4})
    seen["layers"] = start(
        {"pp_degree": 2, "decoder_last_pipeline_num_layers": 2},
        change=lambda a, model: a.prepare(model),
    )
    seen["rotary"] = start({"use_rotary_position_embeddings": False})
    seen["unknown"] = start({"other_megatron_args": {"bucket_sise": 1}})
    seen["twice"] = start({"other_megatron_args": {"hidden_size": 1}})
    seen["fp16"] = start({}, precision="fp16")
    seen["micro"] = start({"num_micro_batches": 3}, steps=1)
    seen["tokens"] = start({"calculate_per_token_loss": True}, steps=1, accumulation=2)
    seen["words"] = start({"tp_degree": 2}, change=with_config(vocab_size=31))
    seen["bias"] = start({}, change=with_config(attention_bias=True))
    seen["window"] = start({}, "mistral", change=with_config(sliding_window=4))
    seen["drops"] = start({}, "gpt2", change=with_config(embd_pdrop=0.3))
    seen["family"] = start({}, change=lambda a, model: a.prepare(torch.nn.Linear(1, 1)))
    seen["alone"] = start({}, change=_without_optimizer)
    seen["several"] = start({}, change=lambda a, model: a.prepare(model, make_model("llama")))
    seen["unlike"] = start({}, change=_unlike_groups)
    seen["kind"] = start({}, change=_another_optimizer)
    seen["again"] = start({}, change=_meta)
    for name, use in {
        "inputs": lambda a, m, o, b: m(**b, token_type_ids=b["labels"]),
        "positions": lambda a, m, o, b: m(**b, position_ids=b["labels"]),
        "labels": lambda a, m, o, b: m(input_ids=b["input_ids"]),
        "items": lambda a, m, o, b: a.backward(m(**b).loss, num_items=3),
        "values": lambda a, m, o, b: a.clip_grad_value_(m.parameters(), 1.0),
        "norm": lambda a, m, o, b: a.clip_grad_norm_(m.parameters(), 1.0, norm_type=1),
        "twice backward": lambda a, m, o, b: _twice(a, m(**b).loss),
        "evaluation": lambda a, m, o, b: a.backward(m.eval()(**b).loss),
        "state": lambda a, m, o, b: o.state_dict(),
    }.items():
        accelerator, things = prepared(("llama", {}, {}))
        batch = next(iter(things[3]))
        seen[name] = raised(lambda u=use, a=accelerator, t=things, b=batch: u(a, *t[:2], b))
    return seen


def _without_optimizer(accelerator, model):
    accelerator.prepare(model.train())(input_ids=torch.ones(1, 4, dtype=torch.long))


def _unlike_groups(accelerator, model):
    groups = [{"params": [p]} for p in model.parameters()]
    accelerator.prepare(model, torch.optim.AdamW(groups))


def _another_optimizer(accelerator, model):
    accelerator.prepare(model, torch.optim.Adagrad(model.parameters()))


def _meta(accelerator, model):
    accelerator.prepare(model.to("meta"))


def _twice(accelerator, loss):
    accelerator.backward(loss)
    accelerator.backward(loss)
