"""The environment of recipes/guess.toml: copy this file, write your own class, and name it in the
recipe as `module:Class`.

Each conversation has an instance of its own. All methods are `async def`, so instances live in the
generator's event loop: right for what answers at once or waits for a server. Written without
`async` each would have a process of its own: right for what computes.
"""


class Guess:
    """Find a number by asking; the fewer guesses, the greater the reward.

    Every public method but reset, get_reward and close is a tool that the model can call.
    """

    def __init__(self, greatest: int = 15, limit: int = 6) -> None:
        """Numbers are from 1 to `greatest`; after `limit` guesses the game is lost. The recipe's
        `params` are these arguments.
        """
        self.greatest, self.limit = greatest, limit
        self.secret = self.guesses = 0
        self.found = False

    async def reset(self, secret: int) -> str:
        """Begin a game: `secret` is the row's column of that name. Nothing may be left of the game
        before, since instances are used again.

        What is returned stands behind the prompt in this conversation.
        """
        self.secret, self.guesses, self.found = secret, 0, False
        return f" It is from 1 to {self.greatest}."

    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses += 1
        self.found = number == self.secret
        if self.found:
            return "correct"
        return "higher" if number < self.secret else "lower"

    @property
    def done(self) -> bool:
        """Ends the conversation."""
        return self.found or self.guesses >= self.limit

    async def get_reward(self) -> float:
        """1 for the first guess, less for each further one, 0 where the number was not found.

        Example: of six allowed, found with the fourth: 1 - 3/6 = 0.5.
        """
        return 1 - (self.guesses - 1) / self.limit if self.found else 0.0
