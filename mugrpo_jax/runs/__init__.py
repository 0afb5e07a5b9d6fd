"""The folder of a run and what is shown while it goes on: journal, stop signal, progress, trackers."""
