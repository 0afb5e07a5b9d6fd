"""Bookkeeping of a run: its folder, journal, trackers, progress bars, stop signals and compile times."""
