"""transformers' own ``device_map`` goes through anydevice, and gives what the plain model gives."""

from __future__ import annotations

import pytest
import torch
import zoo

import anydevice

pytestmark = pytest.mark.xdist_group("integrations")

NAMES = [family.__name__ for family in zoo.FAMILIES]


def on(model, inputs):
    return {name: value.to(model.device) for name, value in inputs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_spread_model_gives_what_the_plain_one_gives(name, saved, sim, enabled, tmp_path):
    model = saved(name).spread(tmp_path / "offload")
    devices = set(model.hf_device_map.values())
    assert {0, "cpu", "disk"} <= devices
    assert model.anydevice_placement.bytes_on("disk") > 0
    assert not any(p.is_meta for p in model.parameters())
    with torch.no_grad():
        logits = model(**saved(name).inputs).logits
    torch.testing.assert_close(logits.cpu(), saved(name).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", zoo.GENERATING)
def test_generation_gives_the_same_tokens(name, saved, sim, enabled, tmp_path):
    ways = {
        "greedy": {},
        "beams": {"num_beams": 3},
        "sampled": {"do_sample": True},
        "static cache": {"cache_implementation": "static", "disable_compile": True},
        "no cache": {"use_cache": False},
    }
    plain, model = saved(name).plain, saved(name).spread(tmp_path / "offload")
    prompt = on(model, saved(name).prompt)
    for way, options in ways.items():
        options = {"max_new_tokens": 5, "do_sample": False} | options
        torch.manual_seed(1)
        expected = plain.generate(**saved(name).prompt, **options)
        torch.manual_seed(1)
        found = model.generate(**prompt, **options)
        assert found.tolist() == expected.tolist(), way


class Pieces:
    """A streamer: what `generate` gives it, piece by piece."""

    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces += value.flatten().tolist()

    def end(self):
        self.pieces.append("end")


def test_padded_streamed_and_assisted_generation(saved, sim, enabled, tmp_path):
    plain, model = saved("llama").plain, saved("llama").spread(tmp_path / "offload")
    options = {"max_new_tokens": 6, "do_sample": False}
    padded = model.generate(**on(model, zoo.PADDED), **options)
    assert padded.tolist() == plain.generate(**zoo.PADDED, **options).tolist()
    first = {"input_ids": zoo.IDS[:1]}
    pieces = Pieces()
    streamed = model.generate(**on(model, first), **options, streamer=pieces)
    assert pieces.pieces == [*streamed[0].tolist(), "end"]
    # The assistant is divided in another way than the model.
    assistant = saved("llama").load(max_memory={1: "50KiB", "cpu": "1GiB"})
    expected = plain.generate(**first, **options, assistant_model=plain)
    found = model.generate(**on(model, first), **options, assistant_model=assistant)
    assert found.tolist() == expected.tolist() == streamed.tolist()


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_saving_an_offloaded_model_writes_every_weight(name, saved, sim, enabled, tmp_path):
    model = saved(name).spread(tmp_path / "offload")
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "again", max_shard_size="60KB")
    again = saved(name).model_class.from_pretrained(tmp_path / "again")
    plain = saved(name).plain.state_dict()
    assert again.state_dict().keys() == plain.keys()
    for key, value in again.state_dict().items():
        assert torch.equal(value, plain[key]), key


def test_weights_for_the_disk_stay_in_their_checkpoint(saved, sim, enabled, tmp_path):
    model = saved("llama").load({"": "disk"})  # no folder is needed: nothing is written
    assert torch.equal(model(**saved("llama").inputs).logits, saved("llama").logits)
    with pytest.raises(
        anydevice.errors.ModelError, match=r"weight is placed on the disk.*offload_folder"
    ):
        saved("llama").load({"": "disk"}, dtype=torch.float64)
    folder = tmp_path / "offload"
    for _ in range(2):  # what is there is used again
        model = saved("llama").load({"": "disk"}, dtype=torch.float64, offload_folder=folder)
        files = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
        assert any(name.endswith(".safetensors") for name, _ in files)
    logits = model(**saved("llama").inputs).logits
    torch.testing.assert_close(logits, saved("llama").logits.double(), atol=1e-4, rtol=1e-4)


def test_one_device_gets_the_whole_model_and_no_hooks(saved, sim, enabled):
    for spelling in (1, "sim:1", torch.device("sim", 1), {"": "sim:1"}):
        model = saved("gpt2").load(spelling)
        assert {p.device for p in model.parameters()} == {torch.device("sim", 1)}
        assert not hasattr(model, "_hf_hook")
        assert torch.allclose(
            model(zoo.IDS.to(model.device)).logits.cpu(), saved("gpt2").logits, atol=1e-5
        )


def test_the_device_of_a_context_and_a_map_that_is_used_again(saved, sim, enabled, tmp_path):
    with torch.device("sim:1"):
        model = saved("gpt2").model_class.from_pretrained(saved("gpt2").folder)
    assert {p.device for p in model.parameters()} == {torch.device("sim", 1)}
    first = saved("gpt2").spread(tmp_path / "offload")
    again = saved("gpt2").load(first.hf_device_map, offload_folder=tmp_path / "offload")
    assert again.hf_device_map == first.hf_device_map


def test_missing_and_mismatched_weights_are_made_on_their_device(saved, sim, enabled, tmp_path):
    from transformers import BertForSequenceClassification

    options = {"max_memory": {0: "60KiB", "cpu": "20KiB"}, "offload_folder": str(tmp_path)}
    model, found = BertForSequenceClassification.from_pretrained(
        saved("bert").folder, device_map="auto", output_loading_info=True, num_labels=3, **options
    )
    assert {"classifier.weight", "classifier.bias"} <= found["missing_keys"]
    assert "disk" in model.hf_device_map.values()
    assert model(zoo.IDS).logits.shape == (2, 3)
    model, found = saved("llama").load(
        max_memory={0: "60KiB", "cpu": "1GiB"},
        vocab_size=70,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    assert {name for name, *_ in found["mismatched_keys"]} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert model(zoo.IDS).logits.shape == (2, 5, 70)


def test_a_torch_file_and_a_state_dict(saved, sim, enabled, tmp_path):
    budgets = {"max_memory": {0: "60KiB", "cpu": "1GiB"}}
    plain = saved("llama").plain
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    from_file = saved("llama").model_class.from_pretrained(tmp_path, device_map="auto", **budgets)
    from_values = saved("llama").model_class.from_pretrained(
        None, config=plain.config, state_dict=plain.state_dict(), device_map="auto", **budgets
    )
    for model in (from_file, from_values):
        assert set(model.hf_device_map.values()) == {0, "cpu"}
        logits = model(zoo.IDS).logits
        torch.testing.assert_close(logits, saved("llama").logits, atol=1e-5, rtol=1e-5)


def test_tied_weights_that_the_checkpoint_has_twice(saved, sim, enabled, tmp_path):
    from safetensors.torch import save_file

    plain = saved("gpt2").plain
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    assert {"transformer.wte.weight", "lm_head.weight"} <= state.keys()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain.config.save_pretrained(tmp_path)
    for device_map in ({"transformer": 0, "lm_head": "cpu"}, {"transformer": "cpu", "lm_head": 0}):
        model = type(plain).from_pretrained(tmp_path, device_map=device_map)
        assert model.lm_head.weight is model.transformer.wte.weight
        logits = model(zoo.IDS).logits
        torch.testing.assert_close(logits, saved("gpt2").logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device_map", "options", "said"),
    [
        ("gpu", {}, "gpu"),
        ("auto", {"max_memory": {0: "ten"}}, "ten"),
        ({"model.layers": 0}, {}, "embed_tokens"),
        ({"": 9}, {}, "9"),
    ],
)
def test_what_cannot_be_used_is_said(device_map, options, said, saved, sim, enabled):
    with pytest.raises(anydevice.AnyDeviceError, match=said):
        saved("llama").load(device_map, **options)


@pytest.mark.parametrize("budgets", [None, {0: "60KiB", "cpu": "1GiB"}])
def test_a_text_pipeline(budgets, saved, sim, enabled):
    from transformers import pipeline

    tokenizer = zoo.word_tokenizer()
    texts = ["w5 w7 w9", "w8 w10"]
    options = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2}
    tokenizer.padding_side = "left"
    plain = pipeline("text-generation", saved("llama").plain, tokenizer=tokenizer, device="cpu")
    made = pipeline(
        "text-generation",
        saved("llama").folder,
        tokenizer=tokenizer,
        device_map="auto",
        model_kwargs={"max_memory": budgets},
    )
    assert made.device.type == "sim"
    assert made(texts, **options) == plain(texts, **options)


def test_an_image_pipeline(sim, enabled, tmp_path):
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, pipeline

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config)
    model.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    pictures = [Image.new("RGB", (16, 12), color) for color in ("red", "green")]
    options = {"image_processor": processor}
    expected = pipeline("image-classification", model, device="cpu", **options)(pictures)
    budgets = {0: "60KiB", "cpu": "1GiB"}
    made = pipeline(
        "image-classification",
        str(tmp_path),
        device_map="auto",
        model_kwargs={"max_memory": budgets},
        **options,
    )
    assert set(made.model.hf_device_map.values()) == {0, "cpu"}
    for found, plain in zip(made(pictures), expected, strict=True):
        assert [entry["label"] for entry in found] == [entry["label"] for entry in plain]
        assert [entry["score"] for entry in found] == pytest.approx(
            [entry["score"] for entry in plain], rel=1e-4
        )
