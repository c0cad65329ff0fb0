"""What the trained model is worth: held-out losses and accepted drafts.

    python -m scripts.train_tiny.evaluate flashstep/models/tiny --corpus DIR

adds to a checkpoint's `training.json` what the reference engine makes of the held-out text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from scripts.train_tiny import corpus as text
from scripts.train_tiny import weights as storage
from scripts.train_tiny.phases import Run
from scripts.train_tiny.twin import Twin, Weights


@torch.no_grad()
def losses(run: Run, weights: Weights, reloaded: Weights, batches: int = 4) -> dict[str, Any]:
    """Held-out loss per token of the float weights, of the rounded ones, and of those read back from the disk."""
    device, specs = run.twin.device, storage.tensor_specs(run.config)
    plain = Twin(run.config, run.twin.token_map.cpu().numpy(), torch.float32, quantize=False, device=device)
    stream, size = run.held_out, run.batch * run.length
    batches = max(1, min(batches, (len(stream) - 1) // size))
    cases = {
        "float": (plain, {name: weight.to(device) for name, weight in weights.items()}),
        "quantized": (
            run.twin,
            {name: storage.as_stored(weight.to(device), specs[name].kind) for name, weight in weights.items()},
        ),
        "reloaded": (run.twin, {name: weight.to(device) for name, weight in reloaded.items()}),
    }
    found = dict.fromkeys(cases, 0.0)
    for count in range(batches):
        places = (torch.arange(size, device=device) + count * size) % (len(stream) - 1)
        targets = stream[places].long().view(run.batch, run.length)
        ids = F.pad(targets[:, :-1], (1, 0), value=text.BOS)
        for name, (twin, values) in cases.items():
            found[name] += F.cross_entropy(twin(typed(values, specs, twin), ids).logits, targets.flatten()).item()
    found = {name: round(value / batches, 4) for name, value in found.items()}
    print(f"{run.elapsed():5.0f} s  held-out loss per token {found}", flush=True)
    return {"held_out": found, "held_out_tokens": batches * size}


def typed(weights: Weights, specs: dict[str, storage.Spec], twin: Twin) -> Weights:
    """Weights in the types that training gives the twin."""
    return {
        name: weight if specs[name].kind == "f32" else weight.to(twin.dtype).to(twin.device)
        for name, weight in weights.items()
    }


@torch.no_grad()
def acceptance(run: Run, weights: Weights, generate: int, end_s: float) -> dict[str, Any]:
    """Greedy text after the held-out prompts, and how many drafts a decoder would have accepted on the way.

    Every position of the generated text gets its block of drafts; a walk over them, from one committed position to
    the next and up to an end token, gives the steps that speculative decoding takes. Stops early rather than run past
    `end_s`.
    """
    twin, specs = run.twin, storage.tensor_specs(run.config)
    block = run.config.dspark_block_size
    rounded = {name: storage.as_stored(weight.to(twin.device), specs[name].kind) for name, weight in weights.items()}
    rounded = typed(rounded, specs, twin)
    # Drafting once a batch is not worth compiling its regions without gradients.
    drafter = Twin(run.config, twin.token_map.cpu().numpy(), device=twin.device)
    prompts = run.prompts
    per_step: list[int] = []
    tried, accepted = np.zeros(block), np.zeros(block)
    num_prompts, began = 0, run.elapsed()
    for first in range(0, len(prompts), run.batch):
        chosen = prompts[first : first + run.batch]
        if num_prompts and run.elapsed() + 1.2 * (run.elapsed() - began) / first * run.batch > end_s:
            break
        lengths = torch.tensor([len(ids) for ids in chosen] + [1] * (run.batch - len(chosen)))
        rows = torch.full((run.batch, run.length), text.EOS)
        for row, ids in enumerate(chosen):
            rows[row, : len(ids)] = torch.tensor(ids)
        rows, lengths = rows.to(twin.device), lengths.to(twin.device)
        for count in range(generate):
            output = twin(rounded, rows)
            at = (lengths + count)[:, None]
            logits = output.logits.view(run.batch, run.length, -1).gather(
                1, (at - 1)[..., None].expand(-1, -1, output.logits.shape[-1])
            )
            rows.scatter_(1, at, logits[:, 0].argmax(-1, keepdim=True))
        output = twin(rounded, rows)
        num_anchors = generate - block - 1
        anchors = (lengths - 1)[:, None] + torch.arange(num_anchors, device=twin.device)
        _, logits, _ = drafter.draft(rounded, rows, output.taps, anchors)
        previous = rows.gather(1, anchors + 1)
        matches = []
        for i in range(block):
            previous = (logits[:, :, i] + twin.markov(rounded, previous)).argmax(-1)
            matches.append(previous == rows.gather(1, anchors + 2 + i))
        runs = torch.stack(matches, -1).cumprod(-1).sum(-1).cpu()  # drafts accepted after each anchor
        for row in range(len(chosen)):
            written = rows[row, int(lengths[row]) :][:generate].tolist()
            end = min(num_anchors, written.index(text.EOS) if text.EOS in written else generate)
            at = 0
            while at < end:
                length = int(runs[row, at])
                per_step.append(length + 1)
                tried[: length + 1] += 1
                accepted[:length] += 1
                at += length + 1
        num_prompts += len(chosen)
        if first == 0:
            for row in range(min(3, len(chosen))):
                words = rows[row, : int(lengths[row]) + generate].tolist()
                start = run.tokenizer.decode(words[1 : int(lengths[row])], skip_special_tokens=False)
                rest = run.tokenizer.decode(words[int(lengths[row]) :], skip_special_tokens=False)
                print(f"--- prompt\n{start}\n--- continuation\n{rest}", flush=True)
    result = {
        "prompts": num_prompts,
        "generated_tokens_per_prompt": generate,
        "steps": len(per_step),
        "mean_accepted_length": round(float(np.mean(per_step)), 4),
        "accepted_given_reached": [round(float(a / max(t, 1)), 4) for a, t in zip(accepted, tried, strict=True)],
    }
    print(f"{run.elapsed():5.0f} s  acceptance {result}", flush=True)
    return result


# -- the checkpoint on the disk, through the reference engine --------------------------------------------------------


def reference_loss(folder: Path, stream: torch.Tensor, length: int) -> float:
    """Loss per token of `stream` in rows of `length`, each behind a begin token, as in `losses`."""
    from flashstep.loading import load  # training itself needs no engine
    from flashstep.state import Rows, State

    loaded = load(folder)
    found = []
    with torch.no_grad():
        for row in stream.long().view(-1, length):
            state = State(loaded.config, num_pages=-(-length // 128), page_tokens=128, rows_per_request=length)
            slot = state.acquire()
            state.reserve(slot, length)
            ids = [text.BOS, *row[:-1].tolist()]
            hidden = loaded.model.forward(state, Rows.of([(slot, 0, ids)])).hidden
            found.append(F.cross_entropy(loaded.model.logits(hidden), row).item())
    return float(np.mean(found))


def main() -> None:
    """Measure the text of the record's held-out losses and write `eval` into the record."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tiny.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--corpus", type=Path, help="a standard library's folder (default: the running Python's)")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence, as in training")
    options = parser.parse_args()
    record_file = options.folder / "training.json"
    record = json.loads(record_file.read_text(encoding="utf-8"))
    documents = text.read_corpus(options.corpus)
    if documents.sha256 != record["corpus"]["sha256"]:
        parser.error(f"--corpus: not the {record['corpus']['source']} that {record_file} names: the hashes differ")
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    stream = text.token_stream(tokenizer, [document.text for document in documents.held_out])
    num_tokens = record["losses"]["held_out_tokens"]
    loss = reference_loss(options.folder, torch.from_numpy(stream[:num_tokens]), options.length)
    record["eval"] = {"reference_loss": round(loss, 4), "tokens": num_tokens}
    storage.write_json(record_file, record)
    print(record["eval"])


if __name__ == "__main__":
    main()
