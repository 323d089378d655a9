"""Do the pictures show what the result says, and nothing it does not say?"""

import dataclasses
import math

import numpy as np
import pytest
from tests.report.sample import B_SIMPLE, EPS_MAX, MIN_STEPS, MIN_UNITS, sample_study

from largebatch.records.schema import Interval, NoiseWindow, StudyResult
from largebatch.report.description import Figure, Trace
from largebatch.report.figures import front_figure, hyperbola, lr_figure, noise_figure, study_figures
from largebatch.report.plotly_page import plotly_figure
from largebatch.report.png import png_bytes


def trace_named(figure: Figure, name: str) -> Trace:
    return next(trace for trace in figure.traces if trace.name == name)


def test_the_drawn_hyperbola_is_the_planted_one() -> None:
    drawn = trace_named(front_figure(sample_study()), "loss 0.08 fit")
    steps, units = np.array(drawn.x, float), np.array(drawn.y, float)
    # (S/S_min - 1)(E/E_min - 1) = 1, McCandlish 2018, 2.11; 1e-9 is rounding of the product alone
    assert (steps / MIN_STEPS[3] - 1) * (units / MIN_UNITS[3] - 1) == pytest.approx(1, abs=1e-9)


def test_the_hyperbola_passes_b_crit_at_twice_both_minima() -> None:
    front = sample_study().fronts[2]
    assert front.b_crit.value is not None
    steps, units = hyperbola(front, (front.b_crit.value,))
    assert (steps[0], units[0]) == pytest.approx((2 * MIN_STEPS[2], 2 * MIN_UNITS[2]))


def test_the_predicted_rate_is_half_of_eps_max_at_b_simple() -> None:
    curve = trace_named(lr_figure(sample_study()), "predicted eps_max / (1 + B_simple/B)")
    rate = np.interp(math.log(B_SIMPLE), np.log(np.array(curve.x, float)), np.array(curve.y, float))
    assert rate == pytest.approx(EPS_MAX / 2, rel=1e-3)  # 80 points, linear between them


def test_windows_that_are_not_resolved_leave_a_gap_and_show_only_their_bound() -> None:
    study = sample_study()
    figure = noise_figure(study)
    resolved = [window for window in study.windows if window.resolved]
    assert len(resolved) == 28
    assert trace_named(figure, "B_simple, measured at batch 32").y == tuple(one.b_simple.value for one in resolved)
    assert trace_named(figure, "not resolved: at least this much").y == (study.windows[23].b_simple.low,)
    assert len(trace_named(figure, "not resolved").x) == 1
    # three entries a window (first step, last step, gap); no upper bound: the box runs to the top of the picture
    assert figure.bands[0].high[3 * 26] == figure.y.high
    assert trace_named(figure, "interval goes on").x == (28 * 20 + 9.5,)


def test_a_value_that_is_not_resolved_is_not_drawn_even_where_the_record_has_one() -> None:
    study = sample_study()
    windows = tuple(dataclasses.replace(window, resolved=False) for window in study.windows)
    front = dataclasses.replace(study.fronts[-1], resolved=False)
    study = dataclasses.replace(study, windows=windows, fronts=(*study.fronts[:-1], front))
    assert all(not trace.name.startswith("B_simple") for trace in noise_figure(study).traces)
    assert all(trace.name != "loss 0.08 fit" for trace in front_figure(study).traces)
    assert "not resolved" in noise_figure(study).plain_caption


def flat_windows(*intervals: Interval) -> tuple[NoiseWindow, ...]:
    """Windows of 20 steps with falling loss; one without a value is not resolved."""
    return tuple(
        NoiseWindow(
            first_step=20 * index,
            last_step=20 * index + 19,
            loss=2.0 / (index + 1),
            trace_cov=3.0,
            grad_sq_norm=0.1,
            b_simple=interval,
            resolved=interval.value is not None,
        )
        for index, interval in enumerate(intervals)
    )


def test_a_huge_interval_is_cut_with_an_arrow_and_does_not_squeeze_the_picture() -> None:
    windows = flat_windows(Interval(value=80.0, low=1e-3, high=1e6), Interval(value=120.0, low=60.0, high=200.0))
    figure = noise_figure(dataclasses.replace(sample_study(), windows=windows))
    assert figure.y.high < 10 * 251  # the upper end of B_crit's interval
    assert figure.y.low > 80 / 10
    cut = [trace for trace in figure.traces if trace.name == "interval goes on"]
    assert [(trace.symbol, trace.x) for trace in cut] == [("up", (9.5,)), ("down", (9.5,))]


def test_a_bound_below_the_picture_is_not_drawn_at_a_height_it_does_not_have() -> None:
    windows = flat_windows(Interval(value=80.0, low=60.0, high=100.0), Interval(value=None, low=0.01))
    figure = noise_figure(dataclasses.replace(sample_study(), windows=windows))
    assert all("at least" not in trace.name for trace in figure.traces)
    assert trace_named(figure, "not resolved").x == (29.5,)


@pytest.mark.parametrize(
    "first, last, claim",
    [
        ((20.0, 15.0, 30.0), (90.0, 60.0, 130.0), "grows from 20 to 90 examples as the loss falls"),
        ((20.0, 15.0, 70.0), (90.0, 60.0, 130.0), "no trend is shown"),
        ((90.0, 60.0, 130.0), (20.0, 15.0, 30.0), "falls from 90 to 20"),
        ((20.0, 15.0, None), (90.0, 60.0, 130.0), "no trend is shown"),
    ],
)
def test_the_noise_caption_claims_a_trend_only_between_disjoint_intervals(
    first: tuple[float, ...], last: tuple[float, ...], claim: str
) -> None:
    ends = [Interval(value=value, low=low, high=high) for value, low, high in (first, last)]
    windows = flat_windows(ends[0], Interval(value=None, low=3.0), ends[1])
    caption = noise_figure(dataclasses.replace(sample_study(), windows=windows)).plain_caption
    assert claim in caption
    assert "(resolved in 2 of 3 windows)" in caption


def test_a_larger_batch_pays_later_only_where_the_front_shows_it_too() -> None:
    study = sample_study()
    windows = flat_windows(Interval(value=20.0, low=15.0, high=30.0), Interval(value=90.0, low=60.0, high=130.0))
    agree = dataclasses.replace(study, windows=windows, fronts=study.fronts[1:])  # B_crit 112 to 206
    against = dataclasses.replace(agree, fronts=(study.fronts[3], study.fronts[1]))
    assert "a larger batch pays later in training" in noise_figure(agree).plain_caption
    assert "pays" not in noise_figure(against).plain_caption


def with_verdicts(*verdicts: tuple[int, str, str]) -> StudyResult:
    """The sample study with one large run for each (batch, rule, verdict)."""
    study = sample_study()
    shape = study.large[1]
    runs = [dataclasses.replace(shape, batch=batch, rule=rule, verdict=word) for batch, rule, word in verdicts]
    return dataclasses.replace(study, large=(study.large[0], *runs))


def error_caption(study: StudyResult) -> str:
    return next(figure for figure in study_figures(study) if figure.name == "error").plain_caption


@pytest.mark.parametrize("missing", ["unresolved", "matches"])
def test_a_batch_is_called_lost_only_where_every_rule_lost_it(missing: str) -> None:
    lost = with_verdicts((64, "linear", "matches"), (256, "linear", "worse"), (256, "noise", "worse"))
    assert "At batch 256 every rule tried ends worse." in error_caption(lost)
    kept = error_caption(with_verdicts((64, "linear", "matches"), (256, "linear", missing), (256, "noise", "worse")))
    assert "every rule" not in kept
    if missing == "unresolved":
        assert kept.startswith("The largest batch shown to keep the baseline's error is 64, with the linear rule.")
        assert "At batch 256 the linear rule is unresolved" in kept
        assert "predicted eps(B) ends worse" in kept
    else:
        assert kept == "The largest batch shown to keep the baseline's error is 256, with the linear rule."


def test_a_smaller_batch_that_is_not_shown_to_match_is_named_below_a_larger_that_is() -> None:
    caption = error_caption(with_verdicts((64, "linear", "unresolved"), (256, "linear", "matches")))
    assert "up to" not in caption
    assert "At batch 64 the linear rule is unresolved" in caption


def test_without_a_match_nothing_is_claimed_and_batches_with_one_verdict_share_a_sentence() -> None:
    caption = error_caption(with_verdicts((64, "linear", "unresolved"), (256, "linear", "unresolved")))
    assert caption.startswith(
        "No batch above the baseline's is shown to keep its error. At batch 64 and 256 the linear"
    )


def test_seeds_that_diverged_are_counted() -> None:
    assert "predicted eps(B) ends worse" in error_caption(sample_study())
    assert "the linear rule diverges and" in error_caption(sample_study())
    study = with_verdicts((64, "linear", "diverged"))
    run = dataclasses.replace(study.large[1], errors=(3.0, None, 3.1, None, 3.2), mean=None)
    assert "diverges in 2 of 5 seeds" in error_caption(dataclasses.replace(study, large=(study.large[0], run)))


def test_the_front_caption_is_the_same_plain_sentence_without_a_reference_batch() -> None:
    study = sample_study()
    whole, lacking = front_figure(study), front_figure(dataclasses.replace(study, reference={}))
    assert whole.plain_caption == lacking.plain_caption
    assert "fewer steps" in whole.plain_caption
    assert "B_crit (diamond)" in whole.plain_caption
    unresolved = tuple(dataclasses.replace(front, resolved=False) for front in study.fronts)
    caption = front_figure(dataclasses.replace(study, fronts=unresolved)).plain_caption
    assert "No goal's fit is resolved, so no curve is drawn." in caption
    assert "B_crit" not in caption


def test_baseline_and_recommended_batch_are_labelled_on_the_front() -> None:
    study = sample_study()
    assert {note.text.strip() for note in front_figure(study).notes} == {"B = 32", "B = 64"}
    kept = dataclasses.replace(study, recommendation=dataclasses.replace(study.recommendation, batch=32))
    figure = front_figure(kept)
    assert {note.text.strip() for note in figure.notes} == {"B = 32"}
    assert trace_named(figure, "batch 32 (baseline, recommended)").line


def test_the_fit_is_dotted_where_it_reaches_a_batch_that_was_not_measured() -> None:
    study = sample_study()
    figure = front_figure(dataclasses.replace(study, reference={"batch": 2}))
    beyond = trace_named(figure, "loss 0.08 fit, below the batches measured")
    assert beyond.dash == "dot"
    assert max(step for step in beyond.x if step) > MIN_STEPS[3] + MIN_UNITS[3] / 2
    assert figure.plain_caption.endswith("Dotted: the fit beyond the batches measured.")
    assert "Dotted" not in front_figure(study).plain_caption


def test_the_learning_rate_caption_names_the_linear_rule_only_where_it_is_drawn() -> None:
    study = sample_study()
    assert "linear rule" in lr_figure(study).plain_caption
    figure = lr_figure(dataclasses.replace(study, reference={}))
    assert all(trace.name != "linear rule" for trace in figure.traces)
    assert "linear rule" not in figure.plain_caption


def test_the_learning_rate_caption_says_how_far_the_winners_lie_from_the_prediction() -> None:
    study = sample_study()
    points = tuple(dataclasses.replace(point, lr=point.lr / 3) for point in study.fronts[-1].points)
    front = dataclasses.replace(study.fronts[-1], points=points)
    caption = lr_figure(dataclasses.replace(study, fronts=(*study.fronts[:-1], front))).plain_caption
    assert "below it" in caption
    assert "best rate first grows" not in caption


def test_the_learning_rate_figure_tells_schedules_from_constant_rates() -> None:
    figure = lr_figure(sample_study())
    assert "full schedule" in figure.plain_caption
    baseline = trace_named(figure, "baseline, peak of its schedule")
    assert (baseline.x, baseline.y) == ((32,), (0.1,))
    assert {note.text for note in figure.notes} == {"0.1", "0.2"}


def test_a_predicted_rate_needs_a_resolved_noise_scale_even_where_it_has_a_value() -> None:
    figure = lr_figure(dataclasses.replace(sample_study(), b_simple=Interval(value=231.0, low=40.0)))
    assert all(not trace.name.startswith("predicted") for trace in figure.traces)


def test_only_the_baseline_and_the_recommended_run_have_bands() -> None:
    figure = next(figure for figure in study_figures(sample_study()) if figure.name == "curves")
    assert len(figure.traces) == 7
    assert [band.group for band in figure.bands] == ["batch 32, baseline", "batch 64, linear rule"]


def test_censored_runs_stand_at_their_bound_with_their_own_mark() -> None:
    study = sample_study()
    trace = trace_named(front_figure(study), "loss 0.08: stopped, needs more")
    bounds = [(bound, bound * point.batch) for point in study.fronts[3].points for bound in point.bounds]
    assert len(bounds) == 4
    assert list(zip(trace.x, trace.y, strict=True)) == bounds
    assert (trace.symbol, trace.filled) == ("beyond", False)


def test_an_unresolved_noise_scale_leaves_the_predicted_rate_out() -> None:
    study = dataclasses.replace(sample_study(), b_simple=Interval(value=None), eps_max=math.nan)
    figure = lr_figure(study)
    assert all(not trace.name.startswith("predicted") for trace in figure.traces)
    assert "not resolved" in figure.plain_caption


def test_a_diverged_rule_is_crossed_and_has_no_mean() -> None:
    figure = next(figure for figure in study_figures(sample_study()) if figure.name == "error")
    assert len(trace_named(figure, "diverged").x) == 1
    assert len(trace_named(figure, "linear rule (mean ± std)").x) == 2


def test_both_renderers_draw_every_description() -> None:
    for figure in study_figures(sample_study()):
        drawn = plotly_figure(figure)
        assert {trace["name"] for trace in drawn["data"] if trace["showlegend"]} != set()
        assert drawn["layout"]["xaxis"]["title"]["text"]
        assert drawn["layout"]["yaxis"]["title"]["text"]
        assert png_bytes(figure, dots_per_inch=50).startswith(b"\x89PNG")


def test_the_same_result_gives_the_same_png() -> None:
    figure = noise_figure(sample_study())
    assert png_bytes(figure, dots_per_inch=50) == png_bytes(figure, dots_per_inch=50)


def test_drawing_png_leaves_matplotlib_settings_alone() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    png_bytes(noise_figure(sample_study()), dots_per_inch=50)
    assert dict(matplotlib.rcParams) == before


def test_a_study_without_full_runs_or_windows_can_be_drawn() -> None:
    study = dataclasses.replace(sample_study(), large=(), windows=())
    figures = study_figures(study)
    assert [figure.name for figure in figures] == ["noise", "front", "learning_rate"]
    assert all(png_bytes(figure, dots_per_inch=50) for figure in figures)
