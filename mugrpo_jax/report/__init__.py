"""What runs did, for people: figures, a summary of runs, a description of rollouts."""

from mugrpo_jax.report.figures import learning_curve as learning_curve
from mugrpo_jax.report.figures import overview as overview
from mugrpo_jax.report.figures import staleness as staleness
from mugrpo_jax.report.history import History as History
from mugrpo_jax.report.history import StageFigures as StageFigures
from mugrpo_jax.report.history import read_run as read_run
from mugrpo_jax.report.history import summary as summary
from mugrpo_jax.report.rollouts import describe_rollouts as describe_rollouts
