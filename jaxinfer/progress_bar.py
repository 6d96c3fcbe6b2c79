"""ProgressBar: tqdm without its monitor thread."""

from tqdm.auto import tqdm


class ProgressBar(tqdm):
    """A tqdm bar. tqdm's monitor thread is not started: it would live on after the bar, until the process ends."""

    monitor_interval = 0
