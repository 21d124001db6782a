"""The AIME protocol, against a server on the loopback device."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.evaluate.tasks import aime, answers, server
from quantize.evaluate.tasks.command import run_tasks
from tests.loopback_openai import LoopbackOpenAI, Reply

ROOM = 131_072
REPLIES = {
    "one": Reply("so \\boxed{7}, no: \\boxed{ 042 }", num_tokens=10),
    "two": Reply("\\boxed{5} and then it went on and", "length", 90),
    "three": Reply("it is three", num_tokens=4),
    "four": Reply("\\boxed{4}", num_tokens=6, reasoning="\\boxed{99}"),
}
PROBLEMS = [("one", 42), ("two", 5), ("three", 3), ("four", "4")]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"id": name, "problem": f"{name}: ?", "answer": n}) + "\n" for name, n in PROBLEMS))
    return path


def reply_to(prompt: str) -> Reply:
    return REPLIES[prompt.partition(":")[0]]


def run(loopback: LoopbackOpenAI, problems: Path, out: Path, sampling: aime.Sampling = aime.Sampling()) -> aime.Score:  # noqa: B008
    return aime.run(server.connect(loopback.url, None), problems, out, sampling, Reporter())


def test_the_protocol(problems: Path, tmp_path: Path) -> None:
    """Last boxed number of the answer itself; by length is wrong though the number is right; one request at a time."""
    with LoopbackOpenAI(reply_to, max_model_len=ROOM) as loopback:
        score = run(loopback, problems, tmp_path / "out").as_json()
    assert score["correct"] == 2
    assert score["pass_at_1"] == 0.5
    assert (score["low"], score["high"]) == (0.15, 0.85)
    assert score["wrong"] == ["two", "three"]
    assert score["finished_by_length"] == ["two"]
    assert score["without_answer"] == ["three"]
    assert score["completion_tokens"] == 110
    assert loopback.most_at_once == 1
    sent = loopback.requests[0]
    assert sent["path"] == "/v1/chat/completions"
    assert {k: sent[k] for k in ("temperature", "top_p", "top_k", "max_tokens")} == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 90_000,
    }  # fmt: skip
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert len(sent["messages"]) == 1


def test_a_stopped_run_continues(problems: Path, tmp_path: Path) -> None:
    """The server fails at the third problem, and a crash cuts a line: only what is missing is asked again."""
    broken = {"three": Reply("no memory left", status=500)}
    with LoopbackOpenAI(lambda p: (REPLIES | broken)[p.partition(":")[0]], max_model_len=ROOM) as loopback:
        with pytest.raises(server.RequestError, match=r"problem three.*status 500: no memory left.*2 of 4 answers are kept"):
            run(loopback, problems, tmp_path)
        file = tmp_path / aime.ANSWERS
        file.write_bytes(file.read_bytes()[:-20])
        loopback.requests.clear()
        loopback.reply = reply_to
        score = run(loopback, problems, tmp_path)
    assert [r["messages"][0]["content"].partition(":")[0] for r in loopback.requests] == ["two", "three", "four"]
    assert [answer.name for answer in score.answers] == ["one", "two", "three", "four"]
    with LoopbackOpenAI(reply_to, max_model_len=ROOM) as loopback:
        assert run(loopback, problems, tmp_path).as_json() == score.as_json()
    assert loopback.requests == []


def test_another_run_is_not_continued(problems: Path, tmp_path: Path) -> None:
    with LoopbackOpenAI(reply_to, max_model_len=ROOM) as loopback:
        run(loopback, problems, tmp_path)
        with pytest.raises(answers.OtherRunError, match=r"sampling: .*0\.6.*1\.0.*Give another --out"):
            run(loopback, problems, tmp_path, aime.Sampling(temperature=1.0))
        problems.write_text(problems.read_text().replace("one: ?", "one: changed?"))
        with pytest.raises(answers.OtherRunError, match="problems_sha256"):
            run(loopback, problems, tmp_path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\\boxed{042}", 42),
        ("$\\boxed{1{,}000}$ or \\boxed{1,024}", 1024),
        ("\\boxed{\\text{7}}", 7),
        ("\\boxed{3} so \\boxed{x + 1}", 3),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{-12}", -12),
        ("\\fboxed{12}", 12),
        ("\\boxed {8}", 8),
        ("\\boxed{12", None),
        ("12", None),
        ("", None),
    ],
)
def test_the_last_boxed_whole_number(text: str, number: int | None) -> None:
    assert aime.last_boxed_integer(text) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no problem"),
        ("{", "line 1 is not JSON"),
        ("[1]", "must be a JSON object, found list"),
        ('{"answer": 1}', "no text under `problem`"),
        ('{"problem": "p", "answer": 0.5}', "`answer` must be a whole number, found 0.5"),
        ('{"problem": "p"}', "`answer` must be a whole number, found None"),
        ('{"id": 1, "problem": "p", "answer": 1}\n{"id": 1, "problem": "q", "answer": 1}', "'1' stands there twice"),
    ],
)
def test_bad_problems_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(answers.ProblemError, match=said):
        answers.read_problems(path)


def test_a_context_too_short_is_refused_before_anything_is_asked(problems: Path, tmp_path: Path) -> None:
    with LoopbackOpenAI(reply_to, max_model_len=32_768) as loopback:
        with pytest.raises(InputError, match=r"32768 tokens.*90000.*--max-model-len"):
            run(loopback, problems, tmp_path)
        assert loopback.requests == []


def test_the_command(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LoopbackOpenAI(reply_to, max_model_len=ROOM) as loopback:
        run_tasks(
            loopback.root, ["aime"], out=tmp_path / "out", problems=problems, as_json=True, max_tokens=500, thinking=False
        )
    printed = json.loads(capsys.readouterr().out)
    assert printed["aime"]["correct"] == 2
    assert printed["aime"]["sampling"]["max_tokens"] == 500
    assert loopback.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert printed == json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert "AIME pass@1 2/4 = 0.500" in (tmp_path / "out" / "tasks.md").read_text()


def test_results_of_one_model_add_up(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks measured earlier stay in the report of the same model, and go with another."""
    earlier = {"task": "gsm8k", "metric": "acc", "filter": "none", "value": 0.5, "stderr": None, "samples": 2, "num_fewshot": 0}
    lm_eval = {"model": "a", "lm_eval_version": "0", "metrics": [earlier], "seconds": 1.0}
    before = {"model": "a", "loaded_from": None, "aime": None, "lm_eval": lm_eval}
    (tmp_path / "tasks.json").write_text(json.dumps(before))
    for model, kept in (("a", lm_eval), ("b", None)):
        (tmp_path / aime.ANSWERS).unlink(missing_ok=True)
        with LoopbackOpenAI(reply_to, model=model, max_model_len=ROOM) as loopback:
            run_tasks(loopback.url, ["aime"], out=tmp_path, problems=problems)
        written = json.loads((tmp_path / "tasks.json").read_text())
        assert (written["model"], written["lm_eval"]) == (model, kept)
        assert ("gsm8k" in capsys.readouterr().out) == (kept is not None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": []}, "--endpoint needs --tasks"),
        ({"tasks": ["aime"]}, "needs --problems"),
        ({"tasks": ["gsm8k"], "problems": Path("p.jsonl")}, "--problems is for --tasks aime"),
        ({"tasks": ["gsm8k"], "endpoint": "localhost"}, "is not a URL"),
        ({"tasks": ["gsm8k"], "endpoint": "http://127.0.0.1:9"}, "nobody answers"),
    ],
)
def test_what_a_user_gets_wrong(arguments: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        run_tasks(**({"endpoint": "http://127.0.0.1:9"} | arguments), out=tmp_path)


def test_another_server_is_recognised() -> None:
    with LoopbackOpenAI(model="a") as loopback:
        assert server.connect(loopback.url, None).model == "a"
        with pytest.raises(server.EndpointError, match="serves a, not b"):
            server.connect(loopback.url, "b")
        with pytest.raises(server.EndpointError, match="status 404"):
            server.connect(f"{loopback.root}/other", None)


def slow(seconds: float) -> Callable[[str], Reply]:
    return lambda _: Reply("late", delay_seconds=seconds)


def test_an_answer_that_takes_too_long(problems: Path, tmp_path: Path) -> None:
    with LoopbackOpenAI(slow(0.5), max_model_len=ROOM) as loopback:
        served = server.connect(loopback.url, None)
        with pytest.raises(server.RequestError, match=r"did not answer within 0\.1 s"):
            aime.run(served, problems, tmp_path, aime.Sampling(), Reporter(), timeout_seconds=0.1)
