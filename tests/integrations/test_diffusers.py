"""diffusers' own device maps and offloading go through anydevice, and give the plain picture."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import warnings

import pytest
import torch
import zoo

import anydevice
from anydevice.errors import MissingDependencyError, OptionError
from anydevice.integrations import diffusers as integration
from anydevice.integrations import transformers

pytestmark = [pytest.mark.xdist_group("integrations")]


@pytest.fixture(scope="module")
def pipelines(saved):
    """The module of diffusers, quiet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers
        import diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion

        with integration.enable():
            pass  # whatever is imported for it warns now
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    return diffusers


@pytest.fixture
def enabled(pipelines):
    with integration.enable():
        yield


def small_vae(pipelines):
    return pipelines.AutoencoderKL(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=4,
    )


TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "projection_dim": 16,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def stable(pipelines, tmp_path_factory):
    """The folder of a small pipeline, and the picture that it draws."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = pipelines.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    tokenizer = zoo.word_tokenizer()
    tokenizer.model_max_length = 8
    pipeline = pipelines.StableDiffusionPipeline(
        vae=small_vae(pipelines),
        text_encoder=CLIPTextModel(CLIPTextConfig(**TEXT)),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=pipelines.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("stable")
    pipeline.save_pretrained(folder)
    return folder, draw(pipeline), pipelines.StableDiffusionPipeline


def load(stable, **options):
    return stable[2].from_pretrained(stable[0], **options)


def draw(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        "w5 w7",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        height=16,
        width=16,
    )
    return made.images.cpu()


def check(pipeline, stable):
    torch.testing.assert_close(draw(pipeline), stable[1], atol=1e-4, rtol=1e-4)


def devices(module):
    return {parameter.device.type for parameter in module.parameters()}


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        (None, {0, 1}),
        # The two larger components fit on no accelerator: both are offloaded.
        ({0: "60KiB", 1: "30KiB"}, {0, "cpu"}),
    ],
)
def test_a_balanced_pipeline(budgets, expected, stable, sim, enabled):
    pipeline = load(stable, device_map="balanced", max_memory=budgets)
    assert set(pipeline.hf_device_map.values()) == expected
    assert pipeline.hf_device_map.keys() == {"unet", "vae", "text_encoder"}
    check(pipeline, stable)


@pytest.mark.parametrize("device", [None, "sim:1"])
def test_model_cpu_offload(device, stable, sim, enabled):
    pipeline = load(stable)
    pipeline.enable_model_cpu_offload(device=device)
    assert pipeline._execution_device == torch.device(device or "sim:0")
    for _ in range(2):
        check(pipeline, stable)
    assert devices(pipeline.unet) == devices(pipeline.vae) == {"cpu"}
    pipeline.remove_all_hooks()
    pipeline.to("sim")
    check(pipeline, stable)


def test_sequential_cpu_offload(stable, sim, enabled):
    pipeline = load(stable)
    pipeline.enable_sequential_cpu_offload()
    assert pipeline._execution_device == torch.device("sim:0")
    check(pipeline, stable)
    assert devices(pipeline.unet) == {"cpu"}
    with pytest.raises(anydevice.AnyDeviceError, match="dispatched"):
        pipeline.to("sim")


@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "leaf_level", "use_stream": True},
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "exclude_modules": "vae"},
        {"offload_type": "leaf_level", "offload_to_disk_path": "groups"},
    ],
)
def test_group_offload(options, stable, sim, enabled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load(stable)
    pipeline.enable_group_offload(onload_device=torch.device("sim"), **options)
    check(pipeline, stable)
    assert devices(pipeline.unet) == {"cpu"}
    assert devices(pipeline.vae) == ({"sim"} if "exclude_modules" in options else {"cpu"})


def test_groups_are_offloaded_to_the_host(stable, sim, enabled):
    pipeline = load(stable)
    with pytest.raises(OptionError, match=r"sim:1.*offload_to_disk_path"):
        pipeline.enable_group_offload(
            torch.device("sim:0"), offload_device=torch.device("sim:1"), offload_type="leaf_level"
        )


@pytest.mark.parametrize(
    ("device_map", "budgets", "expected"),
    [
        ("auto", None, {0, 1}),
        ("auto", {0: "60KiB", 1: "20KiB", "cpu": "1GiB"}, {0, 1, "cpu"}),
        ("auto", {0: "60KiB", "cpu": "60KiB"}, {0, "cpu", "disk"}),
        ({"": "sim:1"}, None, {"sim:1"}),
    ],
)
def test_one_model_of_diffusers(
    device_map, budgets, expected, stable, pipelines, sim, enabled, tmp_path
):
    def run(model):
        inputs = torch.ones(1, 4, 8, 8), torch.tensor([1]), torch.ones(1, 8, 16)
        with torch.no_grad():
            return model(*(tensor.to(model.device) for tensor in inputs)).sample.cpu()

    folder = stable[0] / "unet"
    model = pipelines.UNet2DConditionModel.from_pretrained(
        folder, device_map=device_map, max_memory=budgets, offload_folder=str(tmp_path)
    )
    assert set(model.hf_device_map.values()) == expected
    plain = pipelines.UNet2DConditionModel.from_pretrained(folder)
    torch.testing.assert_close(run(model), run(plain), atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path / "again")
    again = pipelines.UNet2DConditionModel.from_pretrained(tmp_path / "again")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def calls_parts(pipelines):
    """A pipeline that calls parts of its components, and never their forward."""
    from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig

    class Pipeline(pipelines.DiffusionPipeline):
        model_cpu_offload_seq = "text_encoder->vae"

        def __init__(self, vae, text_encoder):
            super().__init__()
            self.register_modules(vae=vae, text_encoder=text_encoder)

        @torch.no_grad()
        def __call__(self):
            device = self._execution_device
            ids = torch.tensor([[1, 5, 7, 2]], device=device)
            features = self.text_encoder.get_text_features(input_ids=ids)
            features = getattr(features, "pooler_output", features)
            picture = torch.ones(1, 3, 16, 16, device=device) * features.mean()
            latents = self.vae.encode(picture).latent_dist.mode()
            return self.vae.decode(latents).sample.cpu()

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    config = CLIPConfig(text_config=TEXT, vision_config=vision.to_dict(), projection_dim=16)
    return Pipeline(small_vae(pipelines), CLIPModel(config).eval())


@pytest.mark.parametrize("way", ["model", "sequential", "group", "disk"])
def test_components_whose_parts_are_called(way, pipelines, sim, enabled, tmp_path):
    expected = calls_parts(pipelines)()
    pipeline = calls_parts(pipelines)
    if way == "model":
        pipeline.enable_model_cpu_offload()
    elif way == "sequential":
        pipeline.enable_sequential_cpu_offload()
    else:
        folder = str(tmp_path) if way == "disk" else None
        pipeline.enable_group_offload(
            torch.device("sim:0"), offload_type="leaf_level", offload_to_disk_path=folder
        )
    for _ in range(2):
        torch.testing.assert_close(pipeline(), expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- the switch


def test_disable_puts_everything_back(pipelines):
    places = [(patch.owner, patch.name) for patch in integration._patches()]

    def look():
        return [vars(owner).get(name) for owner, name in places]

    before = look()
    with integration.enable():
        changed = [n for n, now, old in zip(places, look(), before, strict=True) if now is not old]
        # The version and availability are what they were where accelerate is installed.
        assert len(changed) >= len(places) - 2
        assert transformers.integration.is_enabled
    assert look() == before
    assert not transformers.integration.is_enabled


def test_what_the_user_enabled_stays(pipelines):
    transformers.enable()
    with integration.enable():
        pass
    assert transformers.integration.is_enabled
    with integration.enable():
        transformers.disable()
        assert transformers.integration.is_enabled  # diffusers needs it
    assert not transformers.integration.is_enabled


@pytest.mark.parametrize("version", ["0.30.0", "0.43.0", "1.0"])
def test_another_version_is_refused(version, pipelines, monkeypatch):
    monkeypatch.setattr(pipelines, "__version__", version)
    with pytest.raises(MissingDependencyError, match=rf"diffusers>=0.42,<0.43.*{version}"):
        integration.enable()
    assert not integration.integration.is_enabled
    assert not transformers.integration.is_enabled


def taken_names(text):
    """The names that a module takes from accelerate where it is installed."""
    for top in ast.parse(text).body:
        for node in ast.walk(top) if isinstance(top, ast.If) else ():
            if isinstance(node, ast.Import):
                yield from (a.name for a in node.names if a.name == "accelerate")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accelerate"):
                yield from (a.name for a in node.names)


def test_the_list_of_names_is_the_one_of_the_installed_version():
    root = pathlib.Path(importlib.util.find_spec("diffusers").submodule_search_locations[0])
    found = {}
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "import accelerate\n" in text or "from accelerate" in text:
            names = set(taken_names(text)) - {"CustomDtype"}  # a dtype that only quanto names
            found |= (
                {".".join(path.relative_to(root).with_suffix("").parts): names} if names else {}
            )
    assert found == {name: set(names) for name, names in integration._NAMES.items()}
    for names in found.values():
        for name in names:
            assert integration._ours(name) is not None


def test_a_public_name():
    assert anydevice.integrations.diffusers is integration
