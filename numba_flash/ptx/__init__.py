"""PTX instructions that Numba has no name for, each as one documented function that a kernel calls.

The modules here need numba-cuda, so they are imported where a kernel is made, never by `import numba_flash`.
"""
