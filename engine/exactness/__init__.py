"""Whether a user's own module and data resume exactly, and if not, why: the parts of `assert_resumes_exactly`."""
