"""INF: models of transformers, loaded and run."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydevice import (
    from_pretrained,
)
from anydevice_conformance.jobs import (
    assert_close,
    caps,
    ids,
    saved_transformer,
)
from anydevice_conformance.marks import slow
from anydevice_conformance.subject import Subject


def test_INF_007_from_pretrained(subject: Subject, tmp_path: Path) -> None:
    """A small Llama by `from_pretrained`, divided by caps, gives the host's logits.

    Found: loading failed, or the logits are wrong.
    Fix: see MOV-023 for loading, DTY-003 and MOV-005 for computing; else report it to anydevice.
    """
    plain, folder = saved_transformer("llama", tmp_path)
    model = from_pretrained(type(plain), folder, max_memory=caps(subject, plain))
    x = ids()
    with subject.inference():
        assert_close(subject, model(x).logits, plain(x).logits, "logits")
        assert_close(subject, model(x + 1).logits, plain(x + 1).logits, "logits of other input")


@slow
def test_INF_008_generate(subject: Subject, tmp_path: Path) -> None:
    """A small GPT-2 with tied weights, partly on the host, generates the host's tokens.

    Found: other tokens, or a tie that broke.
    Fix: see MOV-012, DTY-005 and INF-004; else report it to anydevice.
    """
    plain, folder = saved_transformer("gpt2", tmp_path)
    model = from_pretrained(type(plain), folder, max_memory=caps(subject, plain))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    x = ids(batch=1)
    with subject.inference():
        found, expected = model.generate(x, **options), plain.generate(x, **options)
        assert_close(subject, model(expected).logits, plain(expected).logits, "logits")
    assert subject.fetch(found).tolist() == expected.tolist(), "other tokens were generated"


@slow
def test_INF_009_encoder_decoder(subject: Subject, tmp_path: Path) -> None:
    """A small T5 gives the host's answer.

    Found: wrong numbers where weights are used from several places.
    Fix: see MOV-012; else report it to anydevice.
    """
    plain, folder = saved_transformer("t5", tmp_path)
    model = from_pretrained(type(plain), folder, max_memory=caps(subject, plain, 0.4))
    source, target = ids(1), ids(2)
    with subject.inference():
        found = model(input_ids=source, decoder_input_ids=target).logits
        expected = plain(input_ids=source, decoder_input_ids=target).logits
    assert_close(subject, found, expected, "logits")
