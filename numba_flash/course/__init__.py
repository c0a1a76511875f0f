"""The course: exercises, the lab of broken kernels, what an instructor needs."""
