"""GPUs: what their data sheets say, and how well vLLM's operators do on them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from statistics import median

from headgate.core.errors import InputError, unknown

TERA, GIGA, MICRO, NANO = 1e12, 1e9, 1e-6, 1e-9
MIB = 2**20
MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"
TABLES = "AIConfigurator's operator tables for vLLM 0.24, fitted"
OPERATORS = ("gemm", "decode", "prompt", "experts")
UNGRAPHED = 21 * MICRO  # start of an all-reduce that no CUDA graph holds


@dataclass(frozen=True)
class Gemm:
    """c0 + (a^q + f^q)^(1/q): a start, reading at `eb` of the bandwidth, computing at `ef` of the peak."""

    c0: float
    eb: float
    ef: float
    q: float


@dataclass(frozen=True)
class DecodeAttention:
    """A start, `c1` per request and KV head, reading KV at `e` of the memory's speed, joined by `q`."""

    c0: float
    c1: float
    e: float
    q: float


@dataclass(frozen=True)
class PromptAttention:
    """A start, `c1` per token and head, pairs at `e` of the peak."""

    c0: float
    c1: float
    e: float


@dataclass(frozen=True)
class Experts(Gemm):
    """As products, every expert met with `pad` tokens more than it has."""

    pad: float


@dataclass(frozen=True)
class AllReduce:
    c0: float
    speed: float


@dataclass(frozen=True)
class Gpu:
    """One GPU. Speeds and memory are those of the data sheet, in FLOP/s (bf16, dense), bytes/s and bytes."""

    name: str  # as the driver has it
    peak: float
    bandwidth: float
    memory: float
    gemm: Gemm
    decode: DecodeAttention
    prompt: PromptAttention
    experts: Experts
    links: dict[int, AllReduce]  # by the number of GPUs
    fp8: bool = True  # it multiplies fp8 at twice the speed
    origin: str = MEASURED  # of the efficiencies: MEASURED on this GPU, or ASSUMED
    source: str = TABLES
    expert_origin: str = MEASURED

    def __hash__(self) -> int:
        return hash(self.name)


Three = tuple[float, float, float]
Four = tuple[float, float, float, float]


def _gpu(
    name: str,
    sheet: Three,
    gemm: Four,
    decode: Four,
    prompt: Three,
    experts: tuple[float, float, float, float, float],
    links: tuple[Three, Three],
) -> Gpu:
    """Peak in TFLOP/s, bandwidth in TB/s, memory in MiB; starts in microseconds, c1 in nanoseconds.

    Links are starts and GB/s of all-reduces over 2, 4 and 8 GPUs.
    """
    reduces = zip((2, 4, 8), *links, strict=True)
    return Gpu(
        name,
        sheet[0] * TERA,
        sheet[1] * TERA,
        sheet[2] * MIB,
        Gemm(gemm[0] * MICRO, *gemm[1:]),
        DecodeAttention(decode[0] * MICRO, decode[1] * NANO, *decode[2:]),
        PromptAttention(prompt[0] * MICRO, prompt[1] * NANO, prompt[2]),
        Experts(experts[0] * MICRO, *experts[1:]),
        {count: AllReduce(start * MICRO, speed * GIGA) for count, start, speed in reduces},
    )


# Each: name, data sheet, products, attention of decodes and of prompts, experts, links.
H200 = _gpu(
    "NVIDIA H200", (989.4, 4.8, 143771), (4.0, 0.83, 0.81, 3.5), (11.6, 27.5, 0.83, 1.5), (13, 0.43, 0.67),
    (27.5, 0.92, 0.64, 1.5, 4), ((4.5, 4.8, 5.3), (269, 300, 373)),
)  # fmt: skip
H100 = _gpu(
    "NVIDIA H100 80GB HBM3", (989.4, 3.35, 81559), (3.7, 0.87, 0.81, 3.1), (11.6, 27.7, 0.87, 1.8),
    (13, 0.44, 0.68), (26, 0.91, 0.54, 1.8, 12), ((4.3, 4.8, 5.4), (262, 288, 351)),
)  # fmt: skip
A100 = _gpu(
    "NVIDIA A100-SXM4-80GB", (312, 2.04, 81920), (5.8, 0.77, 0.85, 1.6), (17, 40, 0.67, 3.9),
    (11, 0.78, 0.57), (26, 0.91, 0.54, 1.8, 12), ((5.0, 5.7, 6.7), (180, 178, 183)),
)  # fmt: skip
A100 = replace(A100, fp8=False, expert_origin=ASSUMED)  # no table of its experts: the H100's
B200 = _gpu(
    "NVIDIA B200", (2250, 7.7, 183359), (3.7, 0.82, 0.72, 2.7), (9.4, 12, 0.89, 7), (12.5, 0.32, 0.59),
    (19, 0.98, 0.41, 2.2, 44), ((7.1, 7.4, 8.3), (450, 523, 558)),
)  # fmt: skip
RTX_PRO_6000 = _gpu(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", (468, 1.79, 97887), (2.1, 0.86, 0.86, 1.6),
    (12, 24, 0.90, 4), (7.8, 0.45, 0.63), (26, 0.84, 0.39, 2.3, 9), ((4.3, 13, 26), (38, 28, 23)),
)  # fmt: skip
L40S = _gpu(
    "NVIDIA L40S", (362, 0.864, 46068), (0, 0.78, 0.63, 2.3), (10, 31, 0.89, 8), (6.7, 0.60, 0.54),
    (0, 0.83, 0.72, 1.4, 39), ((5.3, 13, 23), (19, 3.8, 2.0)),
)  # fmt: skip
TABLE = {"h200": H200, "h100-sxm": H100, "a100-sxm": A100, "b200": B200}
TABLE |= {"rtx-pro-6000": RTX_PRO_6000, "l40s": L40S}


def from_data_sheet(
    name: str, peak: float, bandwidth: float, memory: float, like: Gpu | None = None, links: Gpu = L40S
) -> Gpu:
    """A GPU without operator tables: efficiencies of `like`, or the table's median; `links` of another.

    Peak in TFLOP/s, bandwidth in TB/s, memory in MiB.
    """
    known = like or median_gpu(list(TABLE.values()))
    return replace(
        known,
        name=name,
        peak=peak * TERA,
        bandwidth=bandwidth * TERA,
        memory=memory * MIB,
        links=links.links,
        origin=ASSUMED,
        expert_origin=ASSUMED,
        source=f"taken from {like.name}" if like else "median of six GPUs",
    )


def median_gpu(gpus: list[Gpu]) -> Gpu:
    medians = {}
    for part in OPERATORS:
        laws = [getattr(gpu, part) for gpu in gpus]
        values = {name: median(getattr(law, name) for law in laws) for name in vars(laws[0])}
        medians[part] = type(laws[0])(**values)
    return replace(gpus[0], **medians)


# The sheet of a GeForce counts its products at half rate, which power does not limit: a public run (in
# studies/cards/derived.py) computed prompts at that speed, an engine's losses (1.18) included.
HALF_RATE = 1.18
AS_L40S = from_data_sheet("NVIDIA GeForce RTX 4090", 165, 1.008, 24564, L40S)
GPUS: dict[str, Gpu] = TABLE | {
    "b300": from_data_sheet("NVIDIA B300", 2250, 8.0, 275040, B200, B200),
    "gh200": from_data_sheet("NVIDIA GH200 480GB", 989.4, 4.0, 97871, H200, H200),
    "h100-nvl": from_data_sheet("NVIDIA H100 NVL", 835, 3.9, 95830, H100),
    "h100-pcie": from_data_sheet("NVIDIA H100 PCIe", 756, 2.0, 81559, H100),
    "h20": from_data_sheet("NVIDIA H20", 148, 4.0, 97871, H200, H200),
    "a100-40gb": replace(from_data_sheet("NVIDIA A100-SXM4-40GB", 312, 1.555, 40960, A100, A100), fp8=False),
    "a100-pcie": replace(from_data_sheet("NVIDIA A100 80GB PCIe", 312, 1.935, 81920, A100), fp8=False),
    "rtx-6000-ada": from_data_sheet("NVIDIA RTX 6000 Ada Generation", 364, 0.96, 49140, L40S),
    "rtx-4090": replace(
        AS_L40S,
        gemm=replace(AS_L40S.gemm, ef=HALF_RATE),
        source=f"{AS_L40S.source}, products at the sheet's speed as in a public run of vLLM 0.19",
    ),
    "l4": from_data_sheet("NVIDIA L4", 121, 0.3, 23034, L40S),
    "a10g": replace(from_data_sheet("NVIDIA A10G", 70, 0.6, 23028), fp8=False),
    "rtx-a6000": replace(from_data_sheet("NVIDIA RTX A6000", 155, 0.768, 49140), fp8=False),
}
SHEET = re.compile(r"(\d{1,6}(?:\.\d{1,4})?)tf-(\d{1,3}(?:\.\d{1,4})?)tb-(\d{1,5}(?:\.\d{1,2})?)gb")
ALIASES = {"h100": "h100-sxm", "a100": "a100-sxm", "a100-80gb": "a100-sxm"}
ALIASES |= {"h200-sxm": "h200", "b200-sxm": "b200"}


def gpu_named(name: str) -> tuple[str, Gpu]:
    """A GPU of the table, by its short name or a common other one; or three numbers of its data sheet.

    `312tf-2.04tb-80gb` is TFLOP/s in bf16 without sparsity, TB/s and GB of memory; its links are PCIe's.
    """
    plain = name.lower().replace("_", "-")
    if numbers := SHEET.fullmatch(plain):
        peak, bandwidth, memory = (float(number) for number in numbers.groups())
        if not (1 <= peak <= 1e5 and 0.01 <= bandwidth <= 100 and 1 <= memory <= 1e4):
            raise InputError(
                f"GPU {name}: no GPU has these numbers; give TFLOP/s, TB/s and GB, as 312tf-2.04tb-80gb"
            )
        return plain, from_data_sheet(plain, peak, bandwidth, memory * 1e9 / MIB)
    plain = ALIASES.get(plain, plain)
    if plain not in GPUS:
        near = get_close_matches(plain, [*GPUS, *ALIASES], n=1, cutoff=0.5)
        alike = [each for each in GPUS if near and each.startswith(near[0])]
        if len(alike) > 1:
            raise InputError(f"unknown GPU {name!r}; did you mean {' or '.join(alike)}?")
        raise unknown("GPU", name, sorted(GPUS))
    return plain, GPUS[plain]
