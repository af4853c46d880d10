"""Published tables of disaggregation: tables 19 and 20 of arXiv 2606.00516, digit by digit."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

from headgate_papers.eb.published import H200, RTX

METRICS = ("tok/s", "TTFT", "TPOT")  # prompt and output tokens per s; mean s; mean ms


class Scene(NamedTuple):
    """One load on one GPU type."""

    gpu: str
    clients: int
    workload: str


Numbers = dict[str, tuple[float, ...]]  # by metric, in the order of WAYS

# Table 19, two GPUs, 512/256 tokens: v1, EB+, one engine for prompts, one for outputs (NaN: out of memory).
WAYS19 = ("v1", "EB+", "1P+1D")
TABLE19: dict[Scene, Numbers] = {
    Scene(H200, 64, "512/256"): {
        "tok/s": (26545, 26857, 22825),
        "TTFT": (0.042, 0.040, 0.091),
        "TPOT": (7.11, 7.03, 8.08),
    },
    Scene(H200, 512, "512/256"): {
        "tok/s": (45731, 45539, 39649),
        "TTFT": (0.788, 0.779, 3.608),
        "TPOT": (29.18, 29.44, 22.81),
    },
    Scene(H200, 2048, "512/256"): {
        "tok/s": (46042, 48015, nan),
        "TTFT": (7.601, 6.330, nan),
        "TPOT": (97.44, 99.71, nan),
    },
    Scene(RTX, 64, "512/256"): {
        "tok/s": (8529, 8691, 8606),
        "TTFT": (0.087, 0.084, 0.164),
        "TPOT": (22.30, 22.10, 21.10),
    },
    Scene(RTX, 512, "512/256"): {
        "tok/s": (21526, 21710, 16467),
        "TTFT": (1.900, 1.900, 6.219),
        "TPOT": (58.90, 58.40, 58.64),
    },
    Scene(RTX, 2048, "512/256"): {
        "tok/s": (16228, 19926, nan),
        "TTFT": (45.900, 45.300, nan),
        "TPOT": (150.00, 63.80, nan),
    },
}

# Table 20, four GPUs: v1, EB+, 1P+3D, 2P+2D, 3P+1D; TTFT printed in ms.
WAYS20 = ("v1", "EB+", "1P+3D", "2P+2D", "3P+1D")
LENGTHS20 = {"prefill": (1024, 128), "balanced": (512, 512), "decode": (128, 1024)}
_TABLE20: dict[tuple[int, str], tuple[str, str]] = {  # RTX PRO 6000, H200: tok/s; TTFT; TPOT
    (128, "prefill"): (
        "25994/26207/23245/42577/31490 185/171/4385/476/482 43.0/42.8/14.6/23.1/32.6",
        "67278/65297/40535/82400/70255 133/124/2763/662/412 16.1/16.7/6.4/8.5/13.1",
    ),
    (128, "balanced"): (
        "11013/11063/12629/11640/9023 121/116/316/229/272 22.6/22.5/19.2/21.1/27.3",
        "28646/28686/31341/29388/21963 75/74/249/178/233 8.6/8.6/7.5/8.2/11.0",
    ),
    (128, "decode"): (
        "7723/7690/7469/6848/5450 65/62/223/166/220 18.1/18.2/18.6/20.4/25.6",
        "18245/19336/18861/17227/13536 46/44/233/179/220 7.6/7.2/7.2/7.9/10.2",
    ),
    (256, "prefill"): (
        "37623/37208/23102/44892/nan 380/381/10283/3369/nan 57.8/58.5/14.5/23.3/nan",
        "88488/87268/40638/77117/nan 304/307/6103/2614/nan 23.4/23.8/6.4/8.3/nan",
    ),
    (256, "balanced"): (
        "16913/16870/19831/17551/11402 235/229/844/505/664 28.6/28.7/22.9/26.9/42.1",
        "43648/43729/47433/42016/26455 158/152/681/395/596 10.9/10.9/8.9/10.9/17.6",
    ),
    (256, "decode"): (
        "12678/12699/12176/10595/7021 125/119/719/404/592 21.4/21.3/21.7/25.4/38.9",
        "30696/29763/29495/24820/16682 108/110/715/438/599 8.7/8.9/8.5/10.6/16.0",
    ),
    (512, "prefill"): (
        "47947/47322/22531/43326/nan 1141/1205/21412/9245/nan 85.3/86.1/14.6/23.9/nan",
        "106324/105432/39925/78486/nan 805/843/12357/5741/nan 36.2/36.2/6.4/8.2/nan",
    ),
    (512, "balanced"): (
        "23914/24037/25080/20397/nan 697/697/4013/1676/nan 38.7/38.6/29.9/43.4/nan",
        "61106/60988/46261/48895/nan 464/413/5753/1128/nan 14.7/14.9/9.2/17.3/nan",
    ),
    (512, "decode"): (
        "18414/18396/17224/13169/7579 319/284/1842/1074/2295 28.2/28.2/28.8/39.1/69.4",
        "46622/46782/38287/30567/17544 251/314/1908/1216/1720 10.9/10.8/11.9/16.2/29.4",
    ),
}


def _numbers(text: str) -> Numbers:
    """One cell group as printed; TTFT in seconds."""
    groups = [tuple(map(float, group.split("/"))) for group in text.split()]
    found = dict(zip(METRICS, groups, strict=True))
    found["TTFT"] = tuple(ms / 1000 for ms in found["TTFT"])
    return found


TABLE20 = {
    Scene(gpu, clients, workload): _numbers(text)
    for (clients, workload), texts in _TABLE20.items()
    for gpu, text in zip((RTX, H200), texts, strict=True)
}
