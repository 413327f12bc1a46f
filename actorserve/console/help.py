"""What the console tells of its verbs: of all, or of one."""

from collections.abc import Sequence

from actorserve.core.operations.verbs import VERBS, nearest, usage


def help_text(words: Sequence[str] = ()) -> str:
    """All verbs, or the one that the first word names."""
    verb = VERBS.get(words[0]) if words else None
    if verb is not None:
        return f"{verb.name} {usage(verb)}\n  {verb.help}"
    if words:
        return f"there is no verb {words[0]}{nearest(words[0], VERBS)}"
    width = max(len(f"{verb.name} {usage(verb)}") for verb in VERBS.values())
    lines = [f"  {verb.name + ' ' + usage(verb):<{width}}  {verb.help}" for verb in VERBS.values()]
    return "\n".join(
        [*lines, "", "All verbs take --json, and acts take --dry-run. At the prompt, Ctrl-D ends the console."]
    )
