"""What each codec costs and saves on a Gaussian: bytes, error, and milliseconds to pack and unpack.

    python benchmarks/codec_speed.py --elements 3000000 --rounds 30 --dtype float32 --device cpu

The codecs take turns within each round, so that whatever else the machine does falls on all of them alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from hilore_cli.measuring.codecs import codec, names

Input = TypeVar("Input")
Output = TypeVar("Output")


def timed(work: Callable[[Input], Output], value: Input, device: str) -> tuple[Output, float]:
    start = time.perf_counter()
    result = work(value)
    if device != "cpu":
        torch.cuda.synchronize()
    return result, (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    values = torch.randn(args.elements, generator=torch.Generator().manual_seed(0))
    values = values.to(args.device, getattr(torch, args.dtype))
    used = [codec(name) for name in names() if codec(name).supports(values.dtype)]
    pack_ms: dict[str, list[float]] = {one.name: [] for one in used}
    unpack_ms: dict[str, list[float]] = {one.name: [] for one in used}
    ratio, error = {}, {}
    for round_ in range(args.rounds + 1):
        for one in used:
            packed, packing = timed(one.pack, values, args.device)
            unpacked, unpacking = timed(one.unpack, packed, args.device)
            if round_ == 0:
                ratio[one.name] = packed.held_bytes / values.nbytes
                error[one.name] = float((unpacked.double() - values.double()).norm() / values.double().norm())
            else:
                pack_ms[one.name].append(packing)
                unpack_ms[one.name].append(unpacking)

    print(
        f"{args.elements} {args.dtype} on {args.device}, {args.threads} threads, {args.rounds} rounds: median (least)"
    )
    print(f"{'codec':<12} {'bytes':>7} {'rel. L2':>8} {'pack ms':>16} {'unpack ms':>16} {'GB/s':>6}")
    for one in used:
        runs = pack_ms[one.name], unpack_ms[one.name]
        columns = [f"{statistics.median(run):8.2f} ({min(run):5.2f})" for run in runs]
        rate = values.nbytes / sum(statistics.median(run) for run in runs) / 1e6
        print(f"{one.name:<12} {ratio[one.name]:7.3f} {error[one.name]:8.5f} {columns[0]} {columns[1]} {rate:6.2f}")


if __name__ == "__main__":
    main()
