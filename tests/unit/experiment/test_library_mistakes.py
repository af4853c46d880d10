"""Mistakes of a newcomer in Python: one line with the remedy."""

import pytest

import headgate

ENGINE = headgate.card_engine("cal-h200-qwen3-8b", slots=4)
REQUESTS = headgate.Workload.of([64] * 4, [8] * 4)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (
            lambda: headgate.simulate(ENGINE, "mixed", (REQUESTS, None)),
            "requests, bad_rows = headgate.read_trace",
        ),
        (lambda: headgate.simulate(ENGINE, "mixed", [1, 2]), "the requests are a list, not a Workload; give"),
        (
            lambda: headgate.simulate_fleet(ENGINE, "mixed", "round-robin", (REQUESTS, None), engines=2),
            "requests, bad_rows = headgate.read_trace",
        ),
        (lambda: headgate.generate(10, prompt=512, output=128), "prompt=512 is no length law; write prompt="),
        (
            lambda: headgate.compare([headgate.simulate(ENGINE, "mixed", REQUESTS)]),
            "compare takes runs by name",
        ),
    ],
)
def test_one_line_with_the_remedy(wrong, remedy):
    with pytest.raises(headgate.InputError) as told:
        wrong()
    assert remedy in str(told.value) and "\n" not in str(told.value)


def test_a_folder_of_several_runs_names_one(tmp_path):
    headgate.simulate(ENGINE, "mixed", REQUESTS).save(tmp_path / "both" / "mixed")
    with pytest.raises(headgate.InputError, match="holds 1 runs, of a comparison or sweep; load one"):
        headgate.Run.load(tmp_path / "both")
