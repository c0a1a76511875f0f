"""What a course needs around the lessons: exercises and their judge, the lab of broken kernels, the exam."""
