"""Running a plan: the parallel module, its process groups, and where weights come from."""
