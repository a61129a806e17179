"""A made-up language whose texts have topics, and classification tasks in it that only their examples define."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import Count, Fraction, check_fields, checked
from mechicl.prompts import TokenSequences
from mechicl.tasks.sampling import RandomTensors, TokenDistribution, sampling_generator
from mechicl.tasks.token_sequences import AtLeastTwo, RepeatedTokens

TOPICS: dict[str, tuple[str, ...]] = {
    "animals": ("cat", "dog", "horse", "cow", "goat", "wolf", "bear", "fox"),
    "birds": ("crow", "owl", "hawk", "swan", "robin", "heron", "dove", "finch"),
    "fruits": ("apple", "pear", "plum", "cherry", "lemon", "grape", "peach", "melon"),
    "trees": ("oak", "pine", "birch", "maple", "willow", "cedar", "elm", "ash"),
    "tools": ("hammer", "saw", "drill", "wrench", "chisel", "pliers", "file", "clamp"),
    "vehicles": ("car", "bus", "train", "truck", "tram", "bicycle", "ferry", "plane"),
    "clothes": ("shirt", "coat", "hat", "glove", "scarf", "boot", "sock", "belt"),
    "body": ("hand", "foot", "knee", "elbow", "shoulder", "neck", "finger", "ear"),
    "weather": ("rain", "snow", "wind", "fog", "storm", "hail", "frost", "thunder"),
    "music": ("violin", "piano", "flute", "drum", "guitar", "harp", "trumpet", "cello"),
    "house": ("door", "window", "roof", "wall", "floor", "stairs", "cellar", "chimney"),
    "kitchen": ("spoon", "fork", "plate", "kettle", "oven", "bowl", "pan", "jug"),
    "sports": ("tennis", "rowing", "boxing", "skiing", "fencing", "judo", "hockey", "golf"),
    "jobs": ("baker", "nurse", "lawyer", "farmer", "miner", "sailor", "tailor", "judge"),
    "metals": ("iron", "copper", "zinc", "gold", "silver", "lead", "nickel", "tin"),
    "shapes": ("circle", "square", "cube", "cone", "sphere", "oval", "star", "cross"),
}
LABELS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "orange", "purple", "violet")
FILLERS = ("the", "a", "some", "and", "with", "near", "of", "every")
START, UNKNOWN, END = "[START]", "[UNKNOWN]", ";"
WORDS = (START, UNKNOWN, END, *LABELS, *FILLERS, *(word for words in TOPICS.values() for word in words))


@checked
def topic_tokenizer() -> Any:
    """Return the tokenizer of `TopicClassification`'s made-up language, a `PreTrainedTokenizerFast` of transformers.

    Each word is one token, words are split at white space, and `[START]` is before every text.

    Example:
        >>> topic_tokenizer()("apple some plum red ;").input_ids
        [0, 39, 17, 41, 3, 2]
    """
    from tokenizers import Tokenizer  # these imports take seconds, and the tasks need none of them
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, WORDS.index(START))])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=START, unk_token=UNKNOWN)


@dataclass(frozen=True, repr=False)
class TopicClassification(TokenDistribution):
    """Sequences of labelled texts, `cat the wolf blue ; oak pine red ; ...`, whose labels mean other topics each time.

    A text is about one topic: at least half of its words are from it, the others are fillers or words of other topics.
    In each sequence some topics are the classes of a task, each with its own label, both random. So the label of a
    sequence's first text cannot be known, and those of later ones only from the texts before. The labels are the
    tokens to predict. `sample(n, seed=...)` draws `TokenSequences`; `texts` draws texts without labels.

    Some sequences can be random words repeated instead (`RepeatedTokens`), as natural text repeats itself: from these a
    small model learns within hundreds of steps to find earlier occurrences and copy what followed, and then to do so
    for texts of one topic. Without them labels alone teach it neither in thousands of steps.

    Attributes:
        n_ctx: number of tokens that a model reads; a sequence has one more, its last target.
        min_classes: smallest number of classes of a sequence.
        max_classes: largest number of classes; their number is uniform.
        min_words: words of the shortest text, without its label.
        max_words: words of the longest text; lengths are uniform.
        n_topical: words of a text that are from its topic.
        share_repeated: probability that a sequence is random words repeated.

    Example:
        >>> TopicClassification(n_ctx=32).sample(2, seed=0).ids.shape
        torch.Size([2, 33])
    """

    n_ctx: AtLeastTwo = 64
    min_classes: Count = 2
    max_classes: Count = 4
    min_words: Count = 2
    max_words: Count = 3
    n_topical: Count = 2
    share_repeated: Fraction = 0.0
    d_vocab = len(WORDS)

    def __post_init__(self):
        check_fields(self)
        most = min(len(TOPICS), len(LABELS))
        if not self.min_classes <= self.max_classes <= most:
            raise ValueError(
                f"classes need min_classes <= max_classes <= {most}, got {self.min_classes} to {self.max_classes}"
            )
        if not self.n_topical <= self.min_words <= self.max_words <= 2 * self.n_topical:
            raise ValueError(
                f"texts need n_topical <= min_words <= max_words <= 2 * n_topical, so that at least half the words "
                f"are from their topic: got n_topical={self.n_topical}, {self.min_words} to {self.max_words} words"
            )

    def _sample(self, n_prompts: int, random: RandomTensors) -> TokenSequences:
        n_texts = self.n_ctx // (self.min_words + 2) + 1  # enough to fill a sequence even with the shortest ones
        topics = random.uniform(n_prompts, len(TOPICS)).argsort(-1)
        labels = random.uniform(n_prompts, len(LABELS)).argsort(-1)
        n_classes = random.integers(self.min_classes, self.max_classes + 1, n_prompts, 1)
        classes = (random.uniform(n_prompts, n_texts) * n_classes).long()
        words, lengths = self._texts(topics.gather(1, classes), random)
        label = _ids(LABELS).to(words)[labels.gather(1, classes)]
        tokens = torch.cat([words, torch.stack([label, torch.full_like(label, WORDS.index(END))], -1)], -1)
        is_label = torch.zeros_like(tokens, dtype=torch.bool)
        is_label[..., self.max_words] = True
        kept = torch.ones_like(is_label)
        kept[..., : self.max_words] = torch.arange(self.max_words, device=label.device) < lengths[..., None]
        # kept tokens first, in their order; then as many as fit after the start
        order = (~kept).flatten(1).byte().argsort(dim=1, stable=True)[:, : self.n_ctx]
        ids, predictable = (values.flatten(1).gather(1, order) for values in (tokens, is_label))
        ids, predictable = F.pad(ids, (1, 0), value=WORDS.index(START)), F.pad(predictable, (1, 0))
        if self.share_repeated:
            longest = self.n_ctx // 2
            repeated = RepeatedTokens(len(WORDS), self.n_ctx, min_period=min(4, longest), max_period=longest)
            other = repeated.sample(n_prompts, generator=random.generator)
            chosen = random.uniform(n_prompts, 1) < self.share_repeated
            ids = torch.where(chosen, other.ids, ids)
            predictable = torch.where(chosen, other.predictable, predictable)
        return TokenSequences(ids, predictable)

    def _texts(self, topics: Int[Tensor, "*text"], random: RandomTensors) -> tuple[Tensor, Tensor]:
        """Words `[*text max_words]` of texts about the topics, and the number of them that each text keeps."""
        vocabulary, fillers = self._topic_words.to(topics.device), _ids(FILLERS).to(topics.device)
        shape = (*topics.shape, self.max_words)
        lengths = random.integers(self.min_words, self.max_words + 1, *topics.shape)
        within = torch.arange(self.max_words, device=topics.device) < lengths[..., None]
        places = torch.where(within, random.uniform(*shape), 2.0).argsort(-1).argsort(-1)
        other = (topics[..., None] + random.integers(1, len(TOPICS), *shape)) % len(TOPICS)
        topic = torch.where(places < self.n_topical, topics[..., None], other)
        words = vocabulary[topic, random.integers(0, vocabulary.shape[1], *shape)]
        filler = (places >= self.n_topical) & (random.uniform(*shape) < 0.5)
        return torch.where(filler, fillers[random.integers(0, len(fillers), *shape)], words), lengths

    @cached_property
    def _topic_words(self) -> Int[Tensor, "topic word"]:
        return torch.stack([_ids(words) for words in TOPICS.values()])

    @checked
    def texts(self, topics: Sequence[str], n_texts: int, *, seed: int) -> tuple[list[str], list[int]]:
        """Draw texts without labels about given topics, the same number for each (up to one), in random order.

        Args:
            topics: names of topics, such as "animals".
            n_texts: number of texts.

        Returns:
            The texts, and for each the index of its topic in `topics`.
        """
        unknown = [topic for topic in topics if topic not in TOPICS]
        if unknown or not topics:
            raise ValueError(f"topics must be some of {list(TOPICS)}, got {list(topics)}")
        generator = sampling_generator(n_texts, seed, None, None)
        which = torch.arange(n_texts)[torch.randperm(n_texts, generator=generator)] % len(topics)
        numbers = torch.tensor([list(TOPICS).index(topic) for topic in topics])[which]
        words, lengths = self._texts(numbers, RandomTensors(generator))
        texts = [" ".join(WORDS[i] for i in row[:n]) for row, n in zip(words.tolist(), lengths.tolist(), strict=True)]
        return texts, which.tolist()


def _ids(words: Sequence[str]) -> Int[Tensor, "word"]:
    return torch.tensor([WORDS.index(word) for word in words])
