"""Do the pictures show what the result says, and nothing it does not say?"""

import dataclasses
import math

import numpy as np
import pytest
from tests.report.sample import B_SIMPLE, EPS_MAX, MIN_STEPS, MIN_UNITS, sample_study

from largebatch.records.schema import Interval
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
    line = figure.traces[0]
    assert [index for index, value in enumerate(line.y) if value is None] == [17, 23]
    bound = trace_named(figure, "at least this much")
    assert bound.y == (study.windows[23].b_simple.low,)
    # no upper bound: the band runs to the top of the picture
    assert figure.bands[0].high[28] == figure.y.high


def test_a_value_that_is_not_resolved_is_not_drawn_even_where_the_record_has_one() -> None:
    study = sample_study()
    windows = tuple(dataclasses.replace(window, resolved=False) for window in study.windows)
    front = dataclasses.replace(study.fronts[-1], resolved=False)
    study = dataclasses.replace(study, windows=windows, fronts=(*study.fronts[:-1], front))
    assert set(noise_figure(study).traces[0].y) == {None}
    assert all(trace.name != "loss 0.08 fit" for trace in front_figure(study).traces)
    assert "not resolved" in noise_figure(study).plain_caption


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
