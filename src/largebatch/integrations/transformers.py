"""Is my batch size right, in a Hugging Face Trainer? `class MyTrainer(NoiseScaleMixin, Trainer)` measures it."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

from largebatch.errors import MissingExtraError
from largebatch.integrations.loops import finish, num_labels, numbers, refuse_cut
from largebatch.noise.monitor import NoiseScaleMonitor

if find_spec("transformers") is None:
    raise MissingExtraError("transformers", "hf", "the noise scale in a Hugging Face Trainer")

_Trainer: Any = object


class NoiseScaleMixin(_Trainer):
    """Put before Trainer: measures each optimizer step before unscaling and clipping, on all processes together.

    A microbatch weighs as in the Trainer's loss: by its labels. They are the unit; but a sequence's tokens are not
    independent, so the number is that of whole sequences, told per token. Logs get `noise_scale`; the state is in a
    checkpoint's trainer_state.json.
    """

    monitor: NoiseScaleMonitor | None = None
    """Made at the first microbatch; its numbers stay readable afterwards."""

    def __init__(self, *args: Any, monitor_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Pass `monitor_options` to NoiseScaleMonitor and the rest to the Trainer."""
        self._options, self._backwards, self._run = monitor_options or {}, 0, None
        super().__init__(*args, **kwargs)

    def num_units(self, inputs: Any) -> int:
        """Labels that the Trainer counts in a microbatch; rows, if there are none."""
        return num_labels(inputs, shifts=getattr(self, "_loss_shifts_labels", False))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Do the Trainer's own, and take the hooks off the model."""
        try:
            return super().train(*args, **kwargs)
        finally:
            finish(self.monitor)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Do the Trainer's own as one microbatch, and measure after the last one of a step."""
        if self.monitor is None or self._run is not self.state:  # every train() and try of a batch has its own
            finish(self.monitor)
            self._run, self._backwards = self.state, 0
            self.monitor = self._make_monitor(model, inputs, num_items_in_batch)
        units = self.num_units(inputs) if self.monitor.measuring else 1
        if not units:
            self.monitor.give_up("a microbatch has no label that counts")
        with self.monitor.microbatch(units) if units else nullcontext():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._backwards += 1
        if self.accelerator.sync_gradients:
            count, self._backwards = self._backwards, 0
            refuse_cut(count, self.current_gradient_accumulation_steps)
            self.monitor.loss_factor = 1 / count if self._divides else 1.0
            self.monitor.step()
        return loss

    def _make_monitor(self, model: Any, inputs: Any, num_items: Any) -> NoiseScaleMonitor:
        divided = self.loss_is_scaled_for_ga  # as the Trainer asks in training_step
        if divided is None:
            divided = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        across = "step_mean" if self.args.average_tokens_across_devices else "local_mean"
        self._divides = not divided
        scaling = {"loss_scaling": across if divided else "microbatch_mean", "grad_scaler": self.accelerator.scaler}
        unit = "tokens" if "labels" in inputs and inputs["labels"].dim() > 1 else "examples"
        options: dict[str, Any] = {"microbatch": max(self.num_units(inputs), 1), "unit": unit} | scaling | self._options
        monitor = NoiseScaleMonitor(model, **options)
        if saved := self.state.stateful_callbacks.get("NoiseScaleMonitor"):
            monitor.load_state_dict(saved["attributes"])
        return monitor

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add "noise_scale", its ends "_low" and "_high", and the mean moments to what is logged in training."""
        if self.monitor is not None and "loss" in logs:
            logs |= numbers(self.monitor.noise_scale)
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Put the monitor's state where a checkpoint is about to save the Trainer's."""
        if self.monitor is not None:
            self.state.stateful_callbacks["NoiseScaleMonitor"] = {"attributes": self.monitor.state_dict()}
        super().save_model(*args, **kwargs)
