"""A reader of the store format written from `format/SPEC.md` and `format/encodings.md` alone, in plain Python.

It shares no code with the project, so that where both agree on a file, the text says what the code does. Whole files
are held in memory and every byte is checked: for tests and golden files, not for serving.
"""
