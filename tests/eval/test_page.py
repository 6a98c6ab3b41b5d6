"""report.html: it says what the files say, alone, to a reader at a desk, with a phone, or on paper.

A browser looks at it where there is one (Debian's chromium); with SPECTRAIN_BROWSER=required a
missing one is a failure.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.eval.charts import HeldOutPoint, held_out_points, learning_curve, list_gain_bars
from spectrain.eval.columns import format_speedup
from spectrain.eval.drafts import EmittableTree, choose_turns, output_texts, tree_positions
from spectrain.eval.page import write_report
from spectrain.eval.report import print_table
from spectrain.eval.run import Evaluation
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2, TreeBuilder

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
ROWS = [
    {
        "id": "count",
        "category": "math",
        "turns": ["Count: one two three one two three one two", "Go on."],
    },
    {
        "id": "why",
        "category": "talk",
        "turns": ["Why is the sky <b>blue</b>?<script>document.title = 'broken'</script>"],
    },
    {"id": "name", "category": "talk", "turns": ["Name a color."]},
]


def score_prompts(target: Target, drafter: Drafter, builder: TreeBuilder, run: Path) -> Path:
    """The folder of an evaluation of three prompts, inside a run with a few metrics."""
    run.mkdir()
    (run / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    metrics: list[dict[str, Any]] = [
        {"step": step, "loss": 5 / step, "agreement": [0.1 * step, 0.05 * step]}
        for step in range(1, 6)
    ]
    metrics[0]["held_out_at_start"] = {"forecast": 1.25, "forecast_interval": [1.2, 1.3]}
    metrics[2]["held_out"] = {"forecast": 1.75, "forecast_interval": [1.7, 1.8]}
    metrics[4]["held_out"] = {"forecast": 1.5, "forecast_interval": [1.4, 1.6]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (run / "config.yaml").write_text("drafter: {}\n")
    evaluation = Evaluation(
        prompts=str(run / "prompts.jsonl"),
        max_new_tokens=10,
        repeats=1,
        baselines=("ngram", "fixed"),
        calibration_limit=1,
    )
    setting = {
        "target": "tiny",
        "recipe": drafter.__class__.__name__,
        "dtype": "float32",
        "device": "cpu",
    }
    evaluation.score(Candidate(target, drafter, builder, Greedy(), setting), run / "eval" / "few")
    return run / "eval" / "few"


@pytest.fixture(scope="module")
def folders(shallow: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two evaluations, and a folder with their comparison."""
    root = tmp_path_factory.mktemp("page")
    torch.manual_seed(0)
    eagle3 = Eagle3(shallow, vocab_size=512)
    eagle3.prepare(shallow, torch.randint(0, 1000, (shallow.head.vocab_size,)))
    evaluations = {
        "eagle3": score_prompts(shallow, eagle3, Eagle2(3, 8, 3), root / "eagle3"),
        "ngram": score_prompts(shallow, Ngram(shallow), Chain(3), root / "ngram"),
        "auto": score_prompts(shallow, eagle3, Auto(), root / "auto"),
    }
    compared = {name: evaluations[name] for name in ("eagle3", "ngram")}
    write_report(root / "report.html", list(compared.values()), describe_comparison(root, compared))
    return {**evaluations, "comparison": root}


def describe_comparison(root: Path, evaluations: dict[str, Path]) -> dict[str, Any]:
    """A comparison of these evaluations, as `spectrain compare` describes it; the last row lacks
    what may be missing.
    """
    rows: list[dict[str, Any]] = []
    for name, folder in evaluations.items():
        own = read_summary(folder)
        where = str(folder.relative_to(root))
        system = {
            key: own[key]
            for key in ("label", "acceptance_length", "speedup", "tokens_per_second", "lossless")
        }
        rows.append(
            {
                "name": name,
                "label": name,
                "family": name,
                "evaluation": where,
                "systems": [system],
                "trained_parameters": 123456,
                "training_seconds": 45.1,
                "extra_memory": 2**21,
                "batched": {"batch_size": 8, "speedup": {"ratio": 1.25}},
                "lossless_to": "target",
            }
        )
    rows.append({"name": "bare"})
    advice = [{"goal": "no training", "choice": "ngram", "because": "it needs none."}]
    return {
        "setting": {"target": "tiny", "budget": "45 s"},
        "rows": rows,
        "recommendations": advice,
        "caveats": ["Few prompts."],
    }


def read_summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless browser without a network of its own."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("SPECTRAIN_BROWSER") == "required":
            pytest.fail(
                "SPECTRAIN_BROWSER=required, and there is no chromium and no google-chrome; "
                "install one"
            )
        pytest.skip("there is no chromium and no google-chrome to look at the page with")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield launched
        launched.close()


def open_page(
    browser: Browser, path: Path, size: str, scheme: Literal["light", "dark"] = "light"
) -> tuple[Page, list[str]]:
    """Open the page at a size; return it with its complaints and its network requests, which are
    refused.
    """
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))

    def refuse_request(route: Any) -> None:
        if route.request.url == path.resolve().as_uri():
            route.continue_()
        else:
            troubles.append(route.request.url)
            route.abort()

    page.route("**/*", refuse_request)
    page.goto(path.resolve().as_uri())
    return page, troubles


@pytest.mark.parametrize("name", ["eagle3", "ngram", "auto"])
def test_drafts_agree_with_samples(shallow: Target, folders: dict[str, Path], name: str) -> None:
    """The text and its rounds are those of samples.jsonl; accepted tokens are the emitted ones
    without the target's own.
    """
    samples = {
        (line["id"], line["turn"]): line for line in read_lines(folders[name], "samples.jsonl")
    }
    *turns, counts = read_lines(folders[name], "drafts.jsonl")
    assert [turn["id"] for turn in turns] == ["count", "why", "name"]
    accepted = drafted = rounds = 0
    for turn in turns:
        sample = samples[turn["id"], turn["turn"]]
        assert "".join(turn["pieces"]) == shallow.tokenizer.decode(sample["output_tokens"])
        assert len(turn["pieces"]) == len(sample["output_tokens"])
        assert [round["emitted"] for round in turn["rounds"]] == sample["accepted"]
        start = 1
        for round in turn["rounds"]:
            texts = [round["tokens"][node] for node in round["kept"]]
            assert texts == turn["pieces"][start : start + len(texts)]
            start += round["emitted"]
            if start <= len(turn["pieces"]):  # a round that was not cut short
                assert round["emitted"] == len(round["kept"]) + 1
                accepted = accepted + len(round["kept"])
                drafted = drafted + len(round["tokens"]) - 1
                rounds = rounds + 1
    positions = counts["tree"]["places"].values()
    assert (
        sum(counts_of_position[1] for counts_of_position in positions),
        sum(counts_of_position[0] for counts_of_position in positions),
    ) == (accepted, drafted)
    assert counts["tree"]["rounds"] == rounds


def test_characters_of_several_tokens_are_not_cut(shallow: Target) -> None:
    """Pieces make up the text, and none ends within a character."""
    text = "na\u00efve \u2014 \U0001f41d\U0001f41d \u8702"
    tokens = shallow.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = output_texts(shallow.tokenizer, tokens)
    assert len(tokens) > len(text) / 2 and "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_accepted_path_among_equal_children() -> None:
    """Children drawn with replacement can be equal: the one whose own child was accepted is on
    the path.
    """
    draft = EmittableTree(tokens=[1, 7, 7, 8], parents=[-1, 0, 0, 2], depths=[0, 1, 1, 2], count=3)
    assert draft.accepted_nodes([7, 8]) == [2, 3] and draft.accepted_nodes([]) == []
    assert tree_positions(draft.parents) == [(), (0,), (1,), (1, 0)]


def test_shown_prompts_cover_the_categories() -> None:
    """One of every category comes before a second of any, follow-up turns are left out, and rows
    are those of the scoring.
    """

    class Turn:
        def __init__(self, category: str, turn: int = 0) -> None:
            self.category, self.turn = category, turn

    turns: Any = [Turn("a"), Turn("a"), Turn("a", 1), Turn("b"), Turn("a"), Turn("c")]
    assert [row for row, _ in choose_turns(turns)] == [1, 4, 6, 2]


def test_the_same_files_give_the_same_page(folders: dict[str, Path]) -> None:
    """The page is the same byte for byte, figures included."""
    write_report(folders["eagle3"] / "again.html", [folders["eagle3"]])
    assert (folders["eagle3"] / "again.html").read_text() == (
        folders["eagle3"] / "report.html"
    ).read_text()


def test_a_missing_file_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """With summary.json alone the table is shown and the page names the missing files; so with
    no file at all.
    """
    shutil.copy(folders["ngram"] / "summary.json", tmp_path)
    write_report(tmp_path / "report.html", [tmp_path])
    page = (tmp_path / "report.html").read_text()
    assert (
        "samples.jsonl, drafts.jsonl, metrics.jsonl" in page
        and 'class="systems stack"' in page
        and 'class="answer"' not in page
    )
    write_report(tmp_path / "empty.html", [tmp_path / "nothing"])
    assert (
        "summary.json, samples.jsonl, drafts.jsonl, metrics.jsonl"
        in (tmp_path / "empty.html").read_text()
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["eagle3", "ngram", "auto", "comparison"])
def test_page_stands_alone_and_fits(
    browser: Browser, folders: dict[str, Path], name: str, size: str
) -> None:
    """No request, no script, no complaint; nothing is wider than the window, and ids are unique."""
    page, troubles = open_page(browser, folders[name] / "report.html", size)
    assert troubles == [] and "broken" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("script, iframe, link[rel=stylesheet], img[src^=http]").count() == 0
    ids = page.evaluate("Array.from(document.querySelectorAll('[id]'), element => element.id)")
    assert len(ids) == len(set(ids))
    page.emulate_media(media="print")
    assert (
        page.locator(".tip:visible").count() == 0
        and page.locator("table:visible").count() == page.locator("table").count()
    )
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


def test_numbers_are_those_of_the_summary(browser: Browser, folders: dict[str, Path]) -> None:
    """Every system's row, depth and category, the positions of the tree, and the curves are the
    summary's.
    """
    page, _ = open_page(browser, folders["eagle3"] / "report.html", "desktop")
    expected = read_summary(folders["eagle3"])
    rows = [row.split("\t") for row in page.locator(".systems tbody tr").all_inner_texts()]
    assert [float(row[1].split()[0]) for row in rows] == [
        1.0,
        *(
            round(entry["acceptance_length"]["pooled"], 2)
            for entry in (expected, *expected["compared"].values())
        ),
    ]
    assert rows[1][3].split("\n")[0] == format_speedup(expected["speedup"])
    assert rows[1][5] == "4 of 4"
    assert page.locator(".categories tbody tr").count() == len(expected["by_category"])
    assert page.locator(".shares tbody tr").count() == 2
    positions = read_lines(folders["eagle3"], "drafts.jsonl")[-1]["tree"]["places"]
    assert (
        page.locator(".tree .node").count() == len(positions)
        and page.locator(".tree .root").count() == 1
    )
    assert page.locator("svg.plot").count() == 4
    page.close()


def words_of(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("name", ["eagle3", "ngram", "auto"])
def test_the_page_begins_with_the_words_of_the_terminal(
    browser: Browser, folders: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to decode with, and what training gained, are the same sentences in both places."""
    page, _ = open_page(browser, folders[name] / "report.html", "desktop")
    shown = " ".join(page.locator(".headline").all_inner_texts())
    print_table(read_summary(folders[name]))
    printed = words_of(capsys.readouterr().out)
    assert len(words_of(shown)) > 10
    assert printed[: len(words_of(shown))] == words_of(shown)
    page.close()


def read_answers(page: Page) -> list[str]:
    """Read the answers of a page without their tips, and without the signs of line ends."""
    return [
        str(text).replace("\u21b5", "")
        for text in page.evaluate(
            """Array.from(document.querySelectorAll('.answer'), answer => {
                const copy = answer.cloneNode(true);
                copy.querySelectorAll('.tip').forEach(tip => tip.remove());
                return copy.textContent;
            })"""
        )
    ]


@pytest.mark.parametrize("name", ["eagle3", "ngram", "auto"])
def test_answers_are_complete(browser: Browser, folders: dict[str, Path], name: str) -> None:
    """Each answer is shown to its end, and the system that is shown drafts in every round."""
    page, _ = open_page(browser, folders[name] / "report.html", "desktop")
    *turns, _ = read_lines(folders[name], "drafts.jsonl")
    assert read_answers(page) == ["".join(turn["pieces"]) for turn in turns]
    assert page.locator(".rest").count() == 0
    tree = "eagle2, 8 nodes" if name == "eagle3" else "chain of 3"
    legend = page.locator(".legend").first.inner_text()
    assert legend.startswith(f"Decoded with the drafter, {tree}. ")
    if name != "ngram":  # a lookup finds no draft where nothing repeats
        drafted = page.locator(".spelled tbody tr td:nth-child(2)").all_inner_texts()
        assert drafted and all(int(text) > 0 for text in drafted)
    page.close()


def test_answers_without_rounds_are_complete(
    browser: Browser, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Where some rounds were not recorded, the answers are still shown to their ends."""
    shutil.copytree(folders["eagle3"], tmp_path / "few")
    lines = read_lines(folders["eagle3"], "drafts.jsonl")
    lines[0]["rounds"] = lines[0]["rounds"][:2]
    lines[1]["rounds"] = []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "few" / "drafts.jsonl").write_text(text)
    write_report(tmp_path / "report.html", [tmp_path / "few"])
    page, _ = open_page(browser, tmp_path / "report.html", "desktop")
    assert read_answers(page) == ["".join(line["pieces"]) for line in lines[:-1]]
    assert page.locator(".rest").count() == 2
    page.close()


@pytest.mark.parametrize("name", ["eagle3", "comparison"])
def test_numbers_stand_next_to_names_on_a_phone(
    browser: Browser, folders: dict[str, Path], name: str
) -> None:
    """Each number is to the right of its row's name, with its title, and needs no scrolling."""
    page, _ = open_page(browser, folders[name] / "report.html", "phone")
    width = SIZES["phone"][0]
    rows = page.locator(".systems tbody tr, .comparison tbody tr").all()
    assert len(rows) >= 3
    for row in rows:
        title = row.locator("th").bounding_box()
        cells = row.locator("td.n:visible").all()
        for cell in cells:
            box = cell.bounding_box()
            assert title is not None and box is not None
            assert box["x"] >= title["x"] + title["width"] and box["x"] + box["width"] <= width
            assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") not in (
                "none",
                '""',
            )
        first = cells[0].bounding_box() if cells else title
        assert first is not None and title is not None
        assert abs(first["y"] - title["y"]) < title["height"]
    assert page.evaluate(
        "Array.from(document.querySelectorAll('.scroll:has(.stack, .spelled)'))"
        ".every(box => box.scrollWidth <= box.clientWidth)"
    )
    page.close()


@pytest.mark.parametrize("size", SIZES)
def test_long_prompts_and_other_scripts_are_readable(
    browser: Browser, folders: dict[str, Path], tmp_path: Path, size: str
) -> None:
    """A long prompt scrolls in a box of its own, which the keyboard reaches; Arabic is read from
    the right, and nothing makes the page wider.
    """
    shutil.copytree(folders["eagle3"], tmp_path / "long")
    lines = read_lines(folders["eagle3"], "drafts.jsonl")
    arabic = "\u0644\u0645\u0627\u0630\u0627 \u0627\u0644\u0633\u0645\u0627\u0621"
    lines[0]["prompt"] = "x" * 900 + " The bees know the way." * 90
    lines[1] |= {"prompt": arabic, "pieces": [arabic, *lines[1]["pieces"][1:]]}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "long" / "drafts.jsonl").write_text(text)
    write_report(tmp_path / "report.html", [tmp_path / "long"])
    page, _ = open_page(browser, tmp_path / "report.html", size)
    boxes = page.locator(".prompt")
    height, shown, full = boxes.first.evaluate(
        "box => [box.offsetHeight, box.clientHeight, box.scrollHeight]"
    )
    assert height < 250 and full > 2 * shown
    boxes.first.focus()
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('.prompt').scrollTop > 0")
    for texts in (boxes, page.locator(".answer")):
        direction = texts.nth(1).evaluate("text => getComputedStyle(text).direction")
        assert direction == "rtl"
        assert texts.nth(0).evaluate("text => getComputedStyle(text).direction") == "ltr"
    assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    page.close()


@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_a_number_is_not_broken_on_a_phone(
    browser: Browser, folders: dict[str, Path], name: str
) -> None:
    """Each value stands on one line, whatever its title is, and every row has values."""
    page, _ = open_page(browser, folders[name] / "report.html", "phone")
    lines = page.evaluate(
        """() => Array.from(document.querySelectorAll('.stack .value'))
            .filter(value => value.getClientRects().length && value.textContent)
            .map(value => {
                const range = document.createRange();
                range.selectNodeContents(value.firstChild);
                return range.getClientRects().length;
            })"""
    )
    assert len(lines) > 10 and {*lines} == {1}
    for row in page.locator(".depths tbody tr").all():
        assert row.locator("td:visible").count()
    page.close()


# The contrast of each shown text with what is behind it, by the formula of WCAG 2.
CONTRASTS = """() => {
    const canvas = document.createElement('canvas').getContext('2d');
    const parse = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return Array.from(canvas.getImageData(0, 0, 1, 1).data);
    };
    const light = ([r, g, b]) => [r, g, b].map(part => part / 255)
        .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const color = parse(getComputedStyle(at).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    const texts = Array.from(document.querySelectorAll(
        'h1, p, li, dd, dt, th, td, caption, .token, .plot text'));
    return texts.filter(text => text.textContent.trim() && text.getClientRects().length)
        .map(text => {
            const style = getComputedStyle(text);
            const ink = light(parse(text.closest('svg') ? style.fill : style.color));
            const paper = light(behind(text));
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        });
}"""


def test_texts_of_charts_are_readable_on_a_phone(
    browser: Browser, folders: dict[str, Path]
) -> None:
    """A figure shrinks to the window, and its labels stay 8 pixels high or more."""
    page, _ = open_page(browser, folders["eagle3"] / "report.html", "phone")
    heights = page.evaluate(
        "Array.from(document.querySelectorAll('.gain text, .learning text'),"
        " text => text.getBoundingClientRect().height)"
    )
    assert len(heights) > 10 and min(heights) >= 8
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(
    browser: Browser, folders: dict[str, Path], scheme: Literal["light", "dark"]
) -> None:
    """The page follows the system's scheme, its figures too, with a contrast of 4.5 or more; the
    labels of data in their own colors are large or bold and have 3 or more.
    """
    page, _ = open_page(browser, folders["eagle3"] / "report.html", "desktop", scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(int(part) for part in re.findall(r"\d+", paper)[:3]) < 3 * 128
    assert is_dark == (scheme == "dark")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts) >= 3
    assert sum(contrast < 4.5 for contrast in contrasts) <= 2
    page.close()


def test_the_learning_curve_begins_with_the_start(
    browser: Browser, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The curve shows the validation before step 1 as a mark of its own, left of all others."""
    page, _ = open_page(browser, folders["eagle3"] / "report.html", "desktop")
    figure = page.locator(".learning")
    start = figure.locator("[id$=learning-start]").bounding_box()
    end = figure.get_by_text("1.50", exact=True).last.bounding_box()
    assert start is not None and end is not None and start["x"] < end["x"]
    assert figure.get_by_text("start 1.25").count() == 1
    assert "1.25 tokens per forward before step 1" in page.locator("section").inner_text()
    page.close()
    points = [HeldOutPoint(0, 1.25, (1.2, 1.3)), HeldOutPoint(3, 1.75, (1.7, 1.8))]
    metrics = read_lines(folders["eagle3"].parents[1], "metrics.jsonl")
    assert held_out_points(metrics)[:2] == points
    later = learning_curve([*points[1:], HeldOutPoint(5, 1.5, (1.4, 1.6))], "later")
    assert later is not None and "learning-start" not in later and "start 1" not in later
    assert learning_curve(points[:1], "one") is None


def test_before_and_after_stand_side_by_side(
    browser: Browser, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The figure has a number for each drafter of each fixed tree, the one before training too."""
    shutil.copytree(folders["eagle3"], tmp_path / "few")
    summary = read_summary(folders["eagle3"])
    drafters = summary["acceptance"]["chain"]["drafters"]
    drafters["untrained"] = {"pooled": 1.01, "ci95": [1.0, 1.02]}
    (tmp_path / "few" / "summary.json").write_text(json.dumps(summary))
    write_report(tmp_path / "report.html", [tmp_path / "few"])
    page, _ = open_page(browser, tmp_path / "report.html", "desktop")
    texts = page.locator(".gain text").all_text_contents()
    own = f"{drafters['drafter']['pooled']:.2f}"
    assert {"chain of 3", "untrained", "1.01", "this drafter", own} <= {*texts}
    page.close()
    drafters["start"] = {"pooled": 1.2, "ci95": None}
    (chain, bars), *_ = list_gain_bars(summary["acceptance"])
    assert chain == "chain of 3"
    assert [name for name, _ in bars] == ["untrained", "after the fit", "this drafter"]


@pytest.mark.parametrize("size", SIZES)
def test_a_token_says_who_proposed_it(
    browser: Browser, folders: dict[str, Path], size: str
) -> None:
    """Pointed at or reached with the keyboard, a token tells its round, its depth or the target,
    and what was rejected.
    """
    page, _ = open_page(browser, folders["ngram"] / "report.html", size)
    turns = enumerate(read_lines(folders["ngram"], "drafts.jsonl"))
    index, turn = next(
        (index, turn) for index, turn in turns if any(round["kept"] for round in turn["rounds"])
    )
    number = next(number for number, round in enumerate(turn["rounds"], 1) if round["kept"])
    answer = page.locator(".answer").nth(index)
    run = answer.locator(".run").nth(number - 1)
    first = run.locator(".token").first
    own = run.locator(".target")
    assert not first.locator(".tip").is_visible()
    first.hover()
    assert first.locator(".tip").inner_text().startswith(f"Round {number}: drafter at depth 1.")
    box = first.locator(".tip").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= SIZES[size][0]
    if own.count():  # not where the limit cut the round
        page.mouse.move(0, 0)
        own.focus()
        assert own.locator(".tip").inner_text().startswith(f"Round {number}: the target itself")
    rejected = next(
        (
            (number, round)
            for number, round in enumerate(turn["rounds"], 1)
            if not round["kept"] and len(round["tokens"]) > 1
        ),
        None,
    )
    if rejected is not None:
        replacement = answer.locator(".run").nth(rejected[0] - 1).locator(".token")
        replacement.hover()
        assert (
            "in place of the draft" in replacement.locator(".tip").inner_text()
            and replacement.locator("q").count() == 1
        )
    page.close()


def test_comparison_comes_first(browser: Browser, folders: dict[str, Path]) -> None:
    """Its table, advice and chart stand before a section for every family, which the rows lead
    to.
    """
    page, _ = open_page(browser, folders["comparison"] / "report.html", "desktop")
    rows = [row.split("\t") for row in page.locator(".comparison tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["eagle3", "ngram", "bare"]
    length = read_summary(folders["eagle3"])["acceptance_length"]
    assert rows[0][2].split("\n")[0] == f"{length['pooled']:.2f}" and "0.12 M" in rows[0]
    assert page.locator("h1").all_inner_texts() == ["Drafters for tiny compared"]
    assert page.locator(".advice dd").all_inner_texts() == ["ngram: it needs none."]
    assert page.locator("section").count() == 2 and page.locator("section .answer").count() == 2
    for link in page.locator(".comparison a").all():
        assert page.locator(f"section{link.get_attribute('href')}").count() == 1
    page.close()
