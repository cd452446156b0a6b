"""The passes of the compiler, one a file, importable as `zgcompile.passes` and under no other name."""

if __name__ != "zgcompile.passes":
    raise ImportError(
        f"import this package as zgcompile.passes, not as {__name__!r}: "
        "a second import name makes a second copy of every class"
    )
