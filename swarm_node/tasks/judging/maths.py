"""(in work)"""
def equal(answer: str, reference: str) -> bool:
    return False
def is_readable(reference: str) -> bool:
    return False
def expression_in(place: str) -> str | None:
    return place
