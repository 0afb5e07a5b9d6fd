"""Compile programs: ahead of time in the background, from a cache on disk, and measure how long it takes."""
