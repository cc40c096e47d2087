"""Generate text with a model that is divided over several processes, on one machine or more.

    torchrun --nproc-per-node 2 examples/generate_over_processes.py FOLDER --prompt "Once"

FOLDER is a transformers model, or a Hub repo id. Without one, a small random model is made. With
``--cpu`` the processes run on the host, so that it can be tried on any machine. On several machines
start it on each with ``torchrun --nnodes``; see docs/several_machines.md.
"""

from __future__ import annotations

import argparse
import tempfile

import torch

from anydevice import PartialState
from anydevice.distributed import load_pipeline, load_tensor_parallel
from anydevice.utils import broadcast_object_list


def make_model() -> str:
    """A folder with a small random model, which knows single bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=None,
    )
    folder = tempfile.mkdtemp(prefix="anydevice-example-")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def read_prompt(folder: str, prompt: str, *, is_random: bool) -> torch.Tensor:
    """The prompt's tokens, of shape (1, length)."""
    if is_random:
        return torch.tensor([list(prompt.encode())])
    from transformers import AutoTokenizer

    tokens: torch.Tensor = AutoTokenizer.from_pretrained(folder)(
        prompt, return_tensors="pt"
    ).input_ids
    return tokens


def main(words: list[str] | None = None) -> list[int]:
    """Run the example, and return the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--tensor-parallel", action="store_true", help="divide every layer")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(words)

    state = PartialState(cpu=args.cpu)
    folder = [args.model or (make_model() if state.is_main_process else None)]
    broadcast_object_list(folder)
    load = load_tensor_parallel if args.tensor_parallel else load_pipeline
    model = load(folder[0])
    if not args.tensor_parallel:
        stage = model.anydevice_stage
        taken = stage.mapped_bytes + stage.read_bytes
        print(f"rank {stage.rank}: {stage.blocks[0]} to {stage.blocks[-1]}, {taken:,} bytes read")

    prompt = read_prompt(folder[0], args.prompt, is_random=args.model is None).to(state.device)
    output = model.generate(prompt, max_new_tokens=args.tokens, do_sample=False)
    tokens: list[int] = output[0].tolist()
    if args.model is None:
        state.print(bytes(tokens))
    elif state.is_main_process:
        from transformers import AutoTokenizer

        print(AutoTokenizer.from_pretrained(folder[0]).decode(tokens, skip_special_tokens=True))
    return tokens


if __name__ == "__main__":
    main()
