"""What processes must have in common to form a cluster: its id, a protocol, and one model with its tokenizer."""

from dataclasses import replace

from actorserve.core.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, Hello

_SHOWN_CHARS = 64


class Identity:
    """Our ``hello``, and what is wrong with others.

    The coordinator has no model, and a gateway only a tokenizer. They take over the digests of the first peer that has
    a model's, and keep them until they end, because their requests have begun with that model. From then on their own
    Hello has the digests as well, so that a restarted coordinator learns them from any process.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello

    def mismatch(self, hello: Hello) -> str:
        """Why the sender of ``hello`` cannot be our peer, with its value and ours; empty if it can."""
        theirs, ours = hello.protocol_version, PROTOCOL_VERSION
        if not OLDEST_PROTOCOL_VERSION <= theirs <= ours + 1:
            return f"it speaks protocol {theirs}, and this process speaks {ours}"
        for what, its_own, our_own in (
            ("model", hello.model_digest, self.hello.model_digest),
            ("tokenizer", hello.tokenizer_digest, self.hello.tokenizer_digest),
        ):
            if its_own and our_own and its_own != our_own:
                return f"its {what} has the digest {_shown(its_own)}, and this process's has {_shown(our_own)}"
        if hello.cluster_id != self.hello.cluster_id:
            return (
                f"its cluster's id is {_shown(hello.cluster_id)}, and this process's is {_shown(self.hello.cluster_id)}"
            )
        return ""

    def learn(self, hello: Hello) -> None:
        """``hello`` is of a new peer: take over what we do not have."""
        if hello.model_digest and not self.hello.model_digest:
            self.hello = replace(
                self.hello,
                model_digest=hello.model_digest,
                tokenizer_digest=self.hello.tokenizer_digest or hello.tokenizer_digest,
            )


def _shown(text: str) -> str:
    return ascii(text[:_SHOWN_CHARS])
