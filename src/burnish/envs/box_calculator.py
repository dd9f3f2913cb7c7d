"""Runs inside the box, alone: reads an expression from stdin, prints its value or an error."""

import ast
import operator
import sys

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}


def value(node: ast.AST) -> float:
    """Evaluate arithmetic (ints stay ints); anything else is a SyntaxError."""
    constant = node.value if isinstance(node, ast.Constant) else None
    if isinstance(constant, (int, float)) and not isinstance(constant, bool):
        return constant
    if isinstance(node, ast.BinOp):
        for kind, apply in BINARY.items():
            if isinstance(node.op, kind):
                result: float = apply(value(node.left), value(node.right))
                return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    raise SyntaxError("only numbers and + - * / // % ( )")


def main() -> None:
    """Answer one question."""
    try:
        result = value(ast.parse(sys.stdin.read().strip(), mode="eval").body)
        text = str(int(result) if result == int(result) else result)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        text = f"Error: {error or type(error).__name__}"
    sys.stdout.write(text[:200] + "\n")


if __name__ == "__main__":
    main()
