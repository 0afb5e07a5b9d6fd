"""Report on one or several runs: write an HTML page, figures, a text summary or a description of rollouts.

from mugrpo_jax.report import figures, read_run, write_page
runs = [read_run("runs/first"), read_run("runs/second")]
write_page(runs, "comparison.html")
figures.learning(runs).savefig("learning.svg")
"""

from mugrpo_jax.report.page import write_page as write_page
from mugrpo_jax.report.rollout_text import describe_rollouts as describe_rollouts
from mugrpo_jax.report.run_history import History as History
from mugrpo_jax.report.run_history import StageFigures as StageFigures
from mugrpo_jax.report.run_history import read_run as read_run
from mugrpo_jax.report.run_summary import comparison as comparison
from mugrpo_jax.report.run_summary import summary as summary
from mugrpo_jax.report.write_report import write as write
from mugrpo_jax.report.write_report import write_figures as write_figures
