"""In which line of a student's file an error arose."""

import traceback


def line_of(path, error):
    """The number of the last line of the file that took part in an error, or None."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def at_line(path, error):
    """ " in line 12", or nothing."""
    line = line_of(path, error)
    return f" in line {line}" if line else ""
