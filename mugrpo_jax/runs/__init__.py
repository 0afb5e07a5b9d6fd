"""The folder of a run: journal, stop signal, progress, trackers, environment, compile times, text tables."""
