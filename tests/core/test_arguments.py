"""A misspelled keyword argument is named, with the one that was meant."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import anydevice.utils
from anydevice import Accelerator
from anydevice.errors import OptionError, UnknownArgumentError
from anydevice.parallelism_config import ParallelismConfig
from anydevice.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ProjectConfiguration,
)

#: All classes of choices that the reference's users import, and a misspelled argument of each.
KINDS = [
    (Accelerator, "mixed_precison", "mixed_precision"),
    (Accelerator, "gradient_acumulation_steps", "gradient_accumulation_steps"),
    (FullyShardedDataParallelPlugin, "offload", "cpu_offload"),
    (DataLoaderConfiguration, "even_batch", "even_batches"),
    (ProjectConfiguration, "automatic_naming", "automatic_checkpoint_naming"),
    (ParallelismConfig, "tp_sizes", "tp_size"),
    (DeepSpeedPlugin, "zero_stge", "zero_stage"),
    (MegatronLMPlugin, "tp_degre", "tp_degree"),
]


@pytest.mark.parametrize(("kind", "wrong", "meant"), KINDS)
def test_a_misspelled_argument_is_named(kind, wrong, meant):
    with pytest.raises(UnknownArgumentError, match=f"no argument '{wrong}'.*'{meant}'") as caught:
        kind(**{wrong: 1})
    assert isinstance(caught.value, TypeError)  # what Python itself raises
    assert isinstance(caught.value, OptionError)


def choices():
    """Every class of choices, by its name; but that of bitsandbytes, which is refused whole."""
    names = [n for n in anydevice.utils.__all__ if n.endswith(("Kwargs", "Plugin"))]
    return [getattr(anydevice.utils, n) for n in (*names, "ProjectConfiguration")]


@pytest.mark.parametrize("kind", choices())
def test_no_class_of_choices_takes_any_name(kind):
    assert "kwargs" not in inspect.signature(kind).parameters
    with pytest.raises(UnknownArgumentError, match=rf"{kind.__name__} has no argument 'xyz'"):
        kind(xyz=1)


def test_they_can_be_copied_and_pickled():
    chosen = ProjectConfiguration("run", total_limit=2)
    assert copy.deepcopy(chosen) == pickle.loads(pickle.dumps(chosen)) == chosen
