"""`headgate trace convert`, and --columns on the command line."""

COLUMNS = "arrival=ts,prompt=input,output=out"


def test_a_file_of_ones_own_becomes_mooncake(headgate, tmp_path):
    (tmp_path / "mine.csv").write_text("ts,input,out\n0,5,6\n1500,7,8\n")
    said = headgate("trace", "convert", "mine.csv", "mine.jsonl", "--columns", COLUMNS)
    assert said.code == 0 and "2 requests in Mooncake's format" in said.out
    assert "read as milliseconds" in said.err
    again = headgate("simulate", "--trace", "mine.jsonl")
    assert again.code == 0 and (tmp_path / "mine.jsonl").read_text().count("1500") == 1


def test_it_replaces_nothing_unasked(headgate, refused, tmp_path):
    (tmp_path / "mine.csv").write_text("ts,input,out\n0,5,6\n")
    (tmp_path / "there").write_text("")
    refused(["trace", "convert", "mine.csv", "there", "--columns", COLUMNS], "there exists")
    refused(["trace", "convert", "mine.csv"], "write headgate trace convert IN OUT.jsonl")


def test_a_note_says_how_times_were_read(headgate, tmp_path):
    (tmp_path / "mine.csv").write_text("ts,input,out\n0,5,6\n1500,7,8\n")
    said = headgate("simulate", "--trace", "mine.csv", "--columns", COLUMNS)
    assert said.code == 0 and "note: arrivals are read as milliseconds" in said.out + said.err


def test_columns_and_a_format_are_one_too_many(refused, tmp_path):
    (tmp_path / "mine.csv").write_text("ts,input,out\n0,5,6\n")
    refused(["simulate", "--trace", "mine.csv", "--columns", COLUMNS, "--format", "vidur"], "drop one")
