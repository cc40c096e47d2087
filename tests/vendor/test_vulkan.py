"""A device that nobody here wrote: torchvulkan, on Mesa's software Vulkan.

All that is tried on so many devices is tried in one process, which is not this one: torch has one
place for a device from outside, and the driver compiles its programs anew in each process. Where
the driver or torchvulkan is missing these tests fail and say what to install; with
``ANYDEVICE_WITHOUT_VULKAN=1`` they are skipped.
"""

import functools
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

ICD_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d")


@pytest.fixture(scope="module")
def lavapipe():
    """The driver's manifest: what the Vulkan loader reads to find one device."""
    if os.environ.get("ANYDEVICE_WITHOUT_VULKAN") == "1":
        pytest.skip("ANYDEVICE_WITHOUT_VULKAN=1")
    if importlib.util.find_spec("torchvulkan") is None:
        pytest.fail(
            "torchvulkan is not installed: pip install --no-deps torchvulkan==0.2.1, or set "
            "ANYDEVICE_WITHOUT_VULKAN=1 to go without these tests."
        )
    manifests = [f for folder in ICD_FOLDERS for f in Path(folder).glob("lvp_icd*.json")]
    if not manifests:
        pytest.fail(
            "Mesa's software Vulkan is not installed: apt-get install --no-install-recommends "
            "mesa-vulkan-drivers, or set ANYDEVICE_WITHOUT_VULKAN=1 to go without these tests."
        )
    return manifests[0]


@pytest.fixture(scope="module")
def drivers(lavapipe, tmp_path_factory):
    """The value of VK_DRIVER_FILES that gives so many devices."""
    folder = tmp_path_factory.mktemp("vulkan-drivers")
    manifest = json.loads(lavapipe.read_text())
    library = Path(manifest["ICD"]["library_path"])
    if not library.is_absolute():
        library = next(p for p in Path("/usr/lib").rglob(library.name))
    copy = folder / f"second_{library.name}"  # the loader takes one library once
    shutil.copy(library, copy)
    manifest["ICD"]["library_path"] = str(copy)
    second = folder / "second_icd.json"
    second.write_text(json.dumps(manifest))
    return {
        0: str(folder / "no_such_icd.json"),
        1: str(lavapipe),
        2: f"{lavapipe}:{second}",
    }


#: In the order in which they are tried: counting comes before any use.
PROGRAM = """
    import json
    import os
    import traceback
    import warnings

    import anydevice
    import torch
    from anydevice.registry import get_backend, list_backends

    MIB = 1 << 20
    torch.set_num_threads(1)

    def found():
        devices = [str(d) for d in anydevice.available_devices()]
        (record,) = [r for r in list_backends() if r.device_type == "vulkan"]
        return [devices, record.package, record.status, record.reason]

    def forked():
        devices = anydevice.available_devices()
        child = os.fork()
        if child == 0:
            moved = torch.ones(3).to(devices[0]).cpu()
            os._exit(0 if moved.sum().item() == 3 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def memory():
        backend = get_backend("vulkan")
        before = [backend.memory_info(i) for i in (0, 1)]
        x = torch.randn(40 * MIB // 4)
        there = backend.move(x, torch.device("vulkan:1"))
        after = [backend.memory_info(i) for i in (0, 1)]
        assert before[1].free - after[1].free == 40 * MIB, (before, after)
        assert abs(before[0].free - after[0].free) < MIB
        assert backend.memory_allocated(1) >= 40 * MIB
        assert torch.equal(backend.move(there, torch.device("cpu")), x)
        assert str(there.device) == "vulkan:1"
        del there
        assert backend.memory_info(1).free == before[1].free
        backend.empty_cache(1)
        assert backend.memory_info(1).free == before[1].free
        state = backend.rng_state(1)
        drawn = torch.rand(5, device="vulkan:1").cpu()
        backend.set_rng_state(state, 1)
        assert torch.equal(torch.rand(5, device="vulkan:1").cpu(), drawn)
        assert backend.supports_dtype(torch.float16)
        assert backend.device_name(0).startswith("llvmpipe")
        try:
            torch.empty(1 << 42, dtype=torch.uint8, device="vulkan:0")
        except Exception as error:
            assert backend.is_out_of_memory(error)
        else:
            raise AssertionError("4 TiB were given")
        return "as it should be"

    def jobs():
        from transformers import LlamaForCausalLM

        warnings.simplefilter("default")
        folder = {folder!r}
        plain = LlamaForCausalLM.from_pretrained(folder).eval()

        def job(caps):
            model = anydevice.from_pretrained(
                LlamaForCausalLM, folder, device_map="auto", max_memory=caps
            )
            ids = torch.arange(12).reshape(2, 6)
            there = ids.to(next(model.parameters()).device)  # needed when no hook moves them
            with torch.no_grad():
                expected = plain(ids).logits
                differences = [(model(there).logits.cpu() - expected).abs().max() for _ in range(2)]
            text = model.generate(there[:1], max_new_tokens=4, do_sample=False).cpu()
            plain_text = plain.generate(ids[:1], max_new_tokens=4, do_sample=False)
            placement = model.anydevice_placement
            places = sorted({{str(anydevice.devices.parse_device(d)) for d in placement.values()}})
            return dict(
                places=places,
                bytes=[placement.bytes_on(place) for place in places],
                difference=max(differences).item(),
                same_text=torch.equal(text, plain_text),
            )

        return [job(caps) for caps in {caps!r}]

    answers = {{}}
    for step in [found] + [forked] * ({devices} == 1) + [memory] * ({devices} == 2) + [jobs]:
        try:
            answers[step.__name__] = step()
        except Exception:
            answers[step.__name__] = traceback.format_exc()
    print(json.dumps(answers))
"""
#: The main job, by the number of devices: budgets, and where weights are then.
JOBS = {
    0: [(None, ["cpu"]), ({"cpu": "100KiB"}, ["cpu", "disk"])],
    1: [
        (None, ["vulkan:0"]),
        ({"vulkan:0": "150KiB", "cpu": "60KiB"}, ["cpu", "disk", "vulkan:0"]),
    ],
    2: [({0: "100KiB", 1: "120KiB", "cpu": "1GiB"}, ["cpu", "vulkan:0", "vulkan:1"])],
}


@pytest.fixture(scope="module")
def tried(vulkan_environment, drivers, tiny_llama):
    """A function that gives what was found with so many devices, or a traceback, by step."""

    @functools.cache
    def run(devices):
        caps = [caps for caps, _ in JOBS[devices]]
        return vulkan_environment.run(
            PROGRAM.format(folder=str(tiny_llama), caps=caps, devices=devices),
            imports=("transformers.models.llama.modeling_llama",),
            VK_DRIVER_FILES=drivers[devices],
        )

    return run


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_it_is_found_by_its_entry_point(tried, devices):
    found, package, status, reason = tried(devices)["found"]
    assert found == [*[f"vulkan:{i}" for i in range(devices)], "cpu"]
    assert package == "anydevice-vulkan 0.1.0"
    assert (status, reason) == (
        ("available", "") if devices else ("unavailable", "no device or driver found")
    )


def test_counting_leaves_a_forked_child_able_to_use_it(tried):
    assert tried(1)["forked"] == 0


def test_memory_and_movement_and_random_numbers(tried):
    assert tried(2)["memory"] == "as it should be"


@pytest.mark.parametrize("devices", [0, 1, 2], ids=["none", "one", "two"])
def test_the_main_job(tried, devices):
    done = tried(devices)["jobs"]
    assert isinstance(done, list), done
    assert [job["places"] for job in done] == [places for _, places in JOBS[devices]]
    for job in done:
        assert all(job["bytes"])
        assert job["difference"] <= (0 if devices == 0 else 1e-5)
        assert job["same_text"]
