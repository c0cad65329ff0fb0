"""Trains the bundled tiny model from the standard library's sources and writes it in the released layout.

    python -m scripts.train_tiny --out DIR [--minutes 8]

Corpus, tokenizer, backbone, draft layers, export and evaluation all happen inside the time given. The folder gets
the checkpoint, `training.json` (what was done and measured) and `prompts_heldout.json`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashstep.config import ModelConfig
from flashstep.stages.engram.token_map import compressed_token_map
from scripts.train_tiny import corpus as text
from scripts.train_tiny import weights as storage
from scripts.train_tiny.evaluate import acceptance, losses
from scripts.train_tiny.phases import Run, train_backbone, train_draft
from scripts.train_tiny.twin import Twin

VOCAB_SIZE = 1024
BACKBONE_PART = 0.6  # of the training time; the draft layers get the rest
EVALUATION_PART = 0.14  # of all the time: losses, generation, export


def main() -> None:
    """Parse the arguments and run every phase."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and its record")
    parser.add_argument("--minutes", type=float, default=8, help="wall clock of the whole run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence, a multiple of 64, at least 320")
    parser.add_argument("--corpus", type=Path, help="a standard library's folder (default: the running Python's)")
    parser.add_argument("--corpus-python", default=platform.python_version(), help="the version of that library")
    parser.add_argument("--corpus-bytes", type=int, help="stop reading sources after about this many bytes")
    parser.add_argument("--generate", type=int, default=70, help="tokens after each held-out prompt, to count drafts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run the regions without torch.compile")
    options = parser.parse_args()
    if options.length % 64 or options.length < 320:
        parser.error("--length: expected a multiple of 64, at least 320")
    if not 8 <= options.generate <= 120:
        parser.error("--generate: expected 8 to 120")

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    run, record = prepare(options, start)
    seconds = options.minutes * 60
    training_end = seconds * (1 - EVALUATION_PART)
    backbone_end = run.elapsed() + (training_end - run.elapsed()) * BACKBONE_PART

    specs = storage.tensor_specs(run.config)
    weights = storage.initial_weights(run.config, options.seed)
    backbone, record["backbone"] = train_backbone(run, weights, specs, backbone_end)
    weights |= backbone
    drafts, record["draft"] = train_draft(run, weights, specs, training_end)
    weights = {name: weight.detach().cpu() for name, weight in (weights | drafts).items()}

    checkpoint_bytes = storage.save(weights, run.config, options.out)
    record["losses"] = losses(run, weights, storage.load(options.out, run.config))
    record["acceptance"] = acceptance(run, weights, options.generate, seconds)
    record["wall_s"] = round(run.elapsed(), 1)
    record["tokens_per_step"] = run.batch * run.length
    files = ("config.json", "tokenizer.json", "tokenizer_config.json")
    record["checkpoint_bytes"] = checkpoint_bytes + sum((options.out / name).stat().st_size for name in files)
    storage.write_json(options.out / "training.json", record)
    print(f"done in {run.elapsed():.0f} s, {record['checkpoint_bytes']:,} bytes in {options.out}", flush=True)


def compiled(switched_off: bool) -> Callable[[Any], Any]:
    """What to put around a region: torch.compile for the few shapes that a run has, or nothing."""
    if switched_off:
        return lambda function: function
    torch._dynamo.config.recompile_limit = 64  # grad and no grad, backbone and draft shapes, with and without entries
    return lambda function: torch.compile(function, dynamic=False)


def prepare(options: argparse.Namespace, start: float) -> tuple[Run, dict[str, Any]]:
    """Corpus, tokenizer, configuration and token streams; the files that describe them are written."""
    documents = text.read_corpus(options.corpus, options.corpus_bytes)
    library = [document for document in documents.training if not document.is_test] or documents.training
    tokenizer = text.train_tokenizer(library, VOCAB_SIZE)
    token_map = compressed_token_map(tokenizer)
    raw = storage.tiny_config(VOCAB_SIZE, int(token_map.max()) + 1)
    config = ModelConfig.from_dict(raw, source="the tiny configuration")
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    storage.write_json(options.out / "config.json", raw)
    storage.write_json(
        options.out / "tokenizer_config.json", text.tokenizer_config(config.max_position_embeddings), indent=2
    )
    print(f"{time.monotonic() - start:5.0f} s  tokenizer trained on {len(library)} files", flush=True)

    prompts = text.held_out_prompts(documents.held_out, tokenizer)
    source = f"standard library of Python {options.corpus_python}"
    storage.write_json(
        options.out / "prompts_heldout.json",
        {"source": source, "licence": "PSF-2.0", "corpus_version": text.VERSION, "prompts": prompts},
    )
    training = text.token_stream(tokenizer, text.training_texts(documents.training, options.seed))
    held_out = text.token_stream(tokenizer, [document.text for document in documents.held_out])
    print(f"{time.monotonic() - start:5.0f} s  {len(training):,} tokens, {len(held_out):,} held out", flush=True)
    run = Run(
        twin=Twin(config, token_map, device=options.device, wrap=compiled(options.no_compile)),
        config=config,
        tokenizer=tokenizer,
        training=torch.from_numpy(training).to(options.device),
        held_out=torch.from_numpy(held_out).to(options.device),
        prompts=[[text.BOS, *tokenizer.encode(str(prompt["text"])).ids] for prompt in prompts],
        batch=options.batch,
        length=options.length,
        generator=torch.Generator().manual_seed(options.seed),
        start=start,
    )
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    record = {
        "corpus": {
            "version": text.VERSION,
            "source": source,
            "sha256": documents.sha256,
            "bytes": documents.num_bytes,
            "files": len(documents.documents),
            "training_tokens": len(training),
            "held_out_tokens": len(held_out),
            "held_out_files": [document.path for document in documents.held_out],
        },
        "device": device,
        "torch": torch.__version__,
        "seed": options.seed,
    }
    return run, record


if __name__ == "__main__":
    main()
