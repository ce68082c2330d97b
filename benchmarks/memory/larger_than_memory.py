"""Memory and time of a client that prunes a model which does not fit in memory.

    python -m benchmarks.memory.larger_than_memory [--shape 1.1b] [--samples 8] [--tokens 256]
    [--dtype float32] [--device cpu]
    python -m benchmarks.memory.larger_than_memory --shape 7b --dtype bfloat16 --reference off
    python -m benchmarks.memory.larger_than_memory --model DIRECTORY --tokens 2048
    --activations disk --evaluate

Without ``--model`` a LLaMA of random weights is made first (bf16, sharded, in a temporary
directory; ``random_llama`` has the shapes). The client's local job runs in a new process, which
reads with ``pread`` and maps no file. Its peak resident memory is compared with the expected one:
the interpreter with its libraries, the calibration activations, two blocks and the input
embeddings. The plain reference, ``plain_wanda`` with the whole model in memory, runs in another new
process; a mask that differs in one bit ends the run. ``--reference off`` is for models that do not
fit.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.random_llama import SHAPES, save_model
from benchmarks.speed.stopwatch import Stopwatch

KEYS = "masks.json"


def peak() -> int:
    """Return the peak resident memory of this process in bytes.

    ``getrusage`` would include the process that started it.
    """
    return _status("VmHWM")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _forget_peak() -> int:
    """Reset the peak, and return the present resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return _status("VmRSS")


def _device_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _opened(given: argparse.Namespace) -> tuple[Any, Any, torch.Tensor]:
    """Return the computing settings, the model and the calibration samples."""
    from espalier.hf.machine.computing import set_up
    from espalier.hf.opening.opened_model import open_model
    from espalier.settings.run import parse

    settings = parse(
        {key: getattr(given, key) for key in ("model", "threads", "device", "dtype", "activations")}
    )
    computing = set_up(settings, Path(given.folder))
    model = open_model(given.model)
    generator = torch.Generator().manual_seed(0)
    return (
        computing,
        model,
        torch.randint(
            0, model.config["vocab_size"], (given.num_samples, given.tokens), generator=generator
        ),
    )


def prune(given: argparse.Namespace) -> dict[str, Any]:
    """Make one client's one-shot masks, and return time and memory."""
    from espalier.evaluation.perplexity import mean_losses
    from espalier.hf.stream.block_stream import Activations, BlockStream
    from espalier.hf.stream.calibration import prune_by_block
    from espalier.hf.stream.edits import masked
    from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
    from espalier.storage.blobs import BlobStore
    from pruning_kernels.selection.local_pruning import LocalPruning

    computing, model, samples = _opened(given)
    choose = LocalPruning("wanda", 0.5, "row").prune_mask
    # Compile the kernel, so that its compilation is not measured.
    choose(
        torch.zeros(1024, 1024, device=computing.device), torch.ones(1024, device=computing.device)
    )
    model.new_skeleton()
    interpreter = _forget_peak()
    store = BlobStore(Path(given.folder))
    keys = list[str]()
    watch = Stopwatch(computing.device)
    watch.watch_entering(BlockStream, "block", "read")
    watch.watch_entering(BlockStream, "_loaded", "read")
    watch.watch(Activations, "through", "forward")
    send = watch.timed(lambda masks: store.put(pack_masks(masks)), "send")
    stream = BlockStream(model, computing)
    for index, masks in prune_by_block(stream, samples, watch.timed(choose, "score and select")):
        keys.append(send(masks))
        del masks
        if index + 1 == given.layers:
            break
    split = watch.stop()
    found = {
        "seconds": sum(split.values()),
        "split": split,
        "interpreter": interpreter,
        "peak": peak(),
    }
    found |= {"device_peak": _device_peak(computing.device), "evaluation_peak": 0} | _sizes(
        given, model, computing
    )
    Path(given.folder, KEYS).write_text(json.dumps(keys))
    if given.evaluate:

        def masks_of(index: int) -> dict[str, torch.Tensor]:
            return (
                unpack_masks(model.plan.blocks[index], store.get(keys[index]))
                if index < len(keys)
                else {}
            )

        _forget_peak()
        mean_losses(stream, {"": samples}, masked(masks_of))
        found["evaluation_peak"] = peak()
    return found


def _sizes(given: argparse.Namespace, model: Any, computing: Any) -> dict[str, Any]:
    """Return the sizes of the model's parts in the computing dtype, in bytes."""
    size = computing.dtype.itemsize
    embeddings = model.checkpoint.tensors[f"{model.family.embeddings}.weight"].shape
    activations = size * given.num_samples * given.tokens * model.config["hidden_size"]
    resident = given.activations == "memory" and computing.device.type == "cpu"
    return {
        "activations": activations,
        "held": activations if resident else 0,
        "held_on_device": activations if given.activations == "memory" else 0,
        "embeddings": size * math.prod(embeddings),
        "block": size * model.plan.num_weights // len(model.plan.blocks),
        "blocks": min(given.layers, len(model.plan.blocks)),
        "on_disk": sum(shard.stat().st_size for shard in model.checkpoint.shards),
    }


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Run the plain loop, compare its masks with the client's, and return time and memory.

    The comparison does not count in the time.
    """
    from transformers import AutoModelForCausalLM

    from benchmarks.memory import plain_wanda
    from espalier.hf.stream.block_stream import samples_per_batch
    from espalier.messages.blobs.mask_tensors import unpack_masks
    from espalier.storage.blobs import BlobStore

    computing, model, samples = _opened(given)
    keys = json.loads(Path(given.folder, KEYS).read_text())
    store = BlobStore(Path(given.folder))
    interpreter = _forget_peak()
    watch = Stopwatch(computing.device)
    whole = AutoModelForCausalLM.from_pretrained(
        model.directory, local_files_only=True, dtype=computing.dtype
    )
    whole = whole.to(computing.device).eval()
    samples = samples.to(computing.device)
    pruned = plain_wanda.prune(
        whole, model.family, samples, samples_per_batch(given.tokens), given.layers
    )
    for index, (masks, key) in enumerate(zip(pruned, keys, strict=True)):
        with watch.counting("compare"):
            for name, mask in unpack_masks(model.plan.blocks[index], store.get(key)).items():
                if different := int((masks[name].cpu() != mask).sum()):
                    raise SystemExit(
                        f"block {index}, {name}: {different} of {mask.numel()} bits are not the"
                        " client's"
                    )
    seconds = watch.stop()["other"]
    return {
        "seconds": seconds,
        "interpreter": interpreter,
        "peak": peak(),
        "device_peak": _device_peak(computing.device),
    }


def report(found: dict[str, Any]) -> None:
    """Print the client's time and memory."""
    megabytes = {name: value / 1e6 for name, value in found.items() if isinstance(value, int)}
    allowed = 2 * megabytes["block"] + megabytes["embeddings"]
    print(
        f"model on disk {megabytes['on_disk']:.0f} MB; {found['blocks']} blocks of"
        f" {megabytes['block']:.0f} MB as computed, embeddings {megabytes['embeddings']:.0f} MB,"
        f" activations {megabytes['activations']:.0f} MB"
    )

    def print_memory(what: str, most: float, without: float) -> None:
        above = most - without
        print(f"{what}: peak {most:.0f} MB, without interpreter and activations {above:.0f} MB,")
        print(f"    {above / allowed:.2f} of two blocks and the embeddings ({allowed:.0f} MB)")

    resident = megabytes["interpreter"] + megabytes["held"]
    print_memory("resident memory", megabytes["peak"], resident)
    if found["evaluation_peak"]:
        print_memory("resident memory while evaluating", megabytes["evaluation_peak"], resident)
    if found["device_peak"]:
        print_memory("device memory", megabytes["device_peak"], megabytes["held_on_device"])
    split = ", ".join(
        f"{name} {1000 * value / found['blocks']:.0f} ms" for name, value in found["split"].items()
    )
    print(f"{found['seconds']:.1f} s; per block: {split}")


def report_reference(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Print time and memory of the plain loop, and the client's ratios."""

    def above(one: dict[str, Any]) -> float:
        return (one["peak"] - one["interpreter"]) / 1e6

    print(
        f"plain loop with the whole model in memory, all {found['blocks']} blocks' masks equal bit"
        " by bit:"
    )
    print(
        f"    {plain['seconds']:.1f} s, the client takes {found['seconds'] / plain['seconds']:.2f}"
        " of it"
    )
    print(
        f"    {above(plain):.0f} MB above the interpreter, the client takes"
        f" {above(found) / above(plain):.2f} of it"
    )
    if plain["device_peak"]:
        ratio = found["device_peak"] / plain["device_peak"]
        print(
            f"    device memory {plain['device_peak'] / 1e6:.0f} MB, the client takes {ratio:.2f}"
            " of it"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="directory of a model")
    parser.add_argument(
        "--shape",
        default="1.1b",
        choices=SHAPES,
        help="of the random model that is made without --model",
    )
    parser.add_argument(
        "--layers", type=int, default=sys.maxsize, help="prune the first blocks alone"
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--activations", default="memory", choices=("memory", "disk"))
    parser.add_argument(
        "--folder",
        default="",
        help="where masks and spilled activations are written; default: temporary",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="measure the evaluation on the samples too"
    )
    parser.add_argument("--reference", default="on", choices=("on", "off"))
    parser.add_argument(
        "--process", default="", choices=("", "client", "reference"), help=argparse.SUPPRESS
    )
    return parser.parse_args()


def _in_a_fresh_process(given: argparse.Namespace, process: str) -> dict[str, Any]:
    """Run one of the two jobs in a new process; a failure ends the run."""
    options = [
        f"--{name}={value}"
        for name, value in vars(given).items()
        if name not in ("evaluate", "process")
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory.larger_than_memory",
        *options,
        f"--process={process}",
    ]
    done = subprocess.run(
        command + ["--evaluate"] * given.evaluate, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Make a model if none is given, measure in new processes, and print."""
    given = _arguments()
    if given.process:
        print(json.dumps({"client": prune, "reference": compare}[given.process](given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not given.model:
            save_model(Path(folder), SHAPES[given.shape])
            given.model = folder
        given.folder = given.folder or folder
        found = _in_a_fresh_process(given, "client")
        report(found)
        if given.reference == "on":
            report_reference(found, _in_a_fresh_process(given, "reference"))


if __name__ == "__main__":
    main()
