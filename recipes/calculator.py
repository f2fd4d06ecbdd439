"""The tools of recipes/calculator.toml: copy this file, write your own functions, and name them in
the recipe as `module:function`.

The model is told a tool's name and arguments by the signature's type hints and the docstring, so
all of them are needed.
"""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b
