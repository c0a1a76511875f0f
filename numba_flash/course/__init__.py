"""The course: exercises and their checks, the lab, the exam."""
