"""Chat prompts for training and judging SmolLM2's draft: forms times subjects, drawn by a seed.

No prompt of the held-out set has a form or a subject of the training set.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

SUBJECTS: Mapping[str, Sequence[str]] = {
    "thing": (
        "photosynthesis", "gravity", "black holes", "inflation", "the water cycle", "volcanoes",
        "vaccines", "the French Revolution", "the Roman Empire", "machine learning", "recursion",
        "the stock market", "plate tectonics", "DNA", "electric cars", "the internet", "rainbows",
        "democracy", "the human heart", "coral reefs", "solar power", "compound interest", "sleep",
        "jazz music", "the Renaissance", "quantum physics", "bees", "chess", "tides", "memory",
        "supply and demand", "the immune system", "evolution", "databases", "cryptography", "tea",
        "climate change", "glaciers", "the Silk Road", "bridges", "antibiotics", "meditation",
        "probability", "stars", "lightning", "the printing press", "yoga", "bread", "languages",
        "renewable energy", "operating systems", "the moon landing", "earthquakes", "whales",
        "opera", "fractions", "the Cold War", "batteries", "airplanes", "taxes", "dreams", "soil",
        "neural networks", "origami", "the nervous system", "magnets", "budgeting", "poetry",
        "ecosystems", "the Industrial Revolution", "viruses", "satellites", "chocolate", "sound",
    ),
    "pair": (
        "cats and dogs", "coffee and tea", "a virus and a bacterium", "Python and Java",
        "weather and climate", "speed and velocity", "a comet and an asteroid", "mass and weight",
        "fiction and non-fiction", "a crocodile and an alligator", "lists and tuples in Python",
        "saving and investing", "a lake and a pond", "novels and short stories", "HTTP and HTTPS",
        "renting and buying a house", "trains and planes", "mean and median", "jam and jelly",
        "hard drives and solid-state drives", "butterflies and moths", "a debit and a credit card",
        "running and swimming", "cities and villages", "prose and poetry", "RAM and storage",
    ),
    "hero": (
        "a lonely lighthouse keeper", "a curious robot", "two rival bakers", "a dragon who sneezes",
        "a girl who finds a map", "an old clockmaker", "a talking cat", "a lost astronaut",
        "a shy violinist", "a fisherman and his grandson", "a fox in winter", "a small town band",
        "a detective who hates rain", "the last librarian", "a snail in a race", "a nervous knight",
        "a child and a paper boat", "a gardener on Mars", "a taxi driver at night", "a brave mouse",
        "a painter who lost her colours", "a ghost who is afraid of people", "a young inventor",
    ),
    "task": (
        "learn to play the guitar", "save money", "plan a birthday party", "sleep better",
        "prepare for a job interview", "grow tomatoes", "start running", "write a novel",
        "clean the kitchen", "learn Spanish", "make new friends", "organise a small office",
        "train a puppy", "pack for a trip to the mountains", "study for an exam", "bake bread",
        "reduce screen time", "repair a bicycle", "give a speech", "build a bookshelf", "meditate",
        "start a blog", "cook for ten people", "move to a new city", "take better photographs",
        "choose a laptop", "stay motivated", "teach a child to read", "eat more vegetables",
    ),
    "program": (
        "reverses a string", "checks whether a number is prime", "counts the words in a text",
        "finds the largest number in a list", "sorts a list of names", "computes a factorial",
        "removes duplicates from a list", "checks whether a word is a palindrome",
        "converts Celsius to Fahrenheit", "counts the vowels in a string", "reads a CSV file",
        "computes the Fibonacci numbers", "merges two dictionaries", "rolls two dice",
        "finds the second smallest number", "computes the average of a list", "prints a triangle",
        "checks whether two words are anagrams", "downloads a web page",
        "computes the area of a circle", "finds common elements of two lists",
        "validates an email address",
        "implements a stack", "does a binary search", "flattens a nested list",
        "draws a chessboard",
    ),
    "letter": (
        "asking my manager for a day off", "thanking a teacher", "inviting friends to a picnic",
        "complaining about a late delivery", "applying for an internship", "to a new neighbour",
        "apologising for missing a meeting", "asking for a refund", "recommending a colleague",
        "announcing a new product", "welcoming a new employee", "asking about a course",
        "cancelling a subscription", "congratulating a friend on a new job", "to a landlord about a"
        " broken heater", "asking a professor for advice", "reminding a customer of an invoice",
    ),
    "sentence": (
        "The cat sat on the mat because it was tired.", "We was going to the store yesterday.",
        "He don't like apples, but she do.", "The results of the experiment was not expected.",
        "I am writing to inform you that the meeting has been moved to Friday.",
        "Despite the rain, the children played outside until the sun went down.",
        "The quick brown fox jumps over the lazy dog.", "Me and him went to school.",
        "Our company strives to deliver value to its customers every single day.",
        "The museum, which was built in 1890, attracts thousands of visitors every year.",
        "If I would have known, I would have come earlier.", "She sings beautiful.",
        "Technology has changed the way people communicate with each other.",
        "The doctor told the patient that he should rest.", "There is many reasons to learn music.",
    ),
    "place": (
        "Paris", "Japan", "Brazil", "Cairo", "Iceland", "New York", "India", "Rome", "Kenya",
        "Peru", "Istanbul", "Norway", "Australia", "Mexico City", "Vietnam", "Prague", "Morocco",
        "Canada", "Greece", "Singapore", "London", "South Africa", "Lisbon", "the Netherlands",
    ),
    "number": tuple(str(value) for value in (12, 15, 18, 24, 27, 36, 45, 48, 60, 72, 84, 90, 96)),
    "food": (
        "pancakes", "vegetable soup", "fried rice", "an omelette", "tomato pasta", "guacamole",
        "apple pie", "lentil curry", "a Greek salad", "banana bread", "hummus", "tacos", "risotto",
        "chocolate cookies", "mushroom stew", "roasted potatoes", "a fruit smoothie", "pizza dough",
    ),
}  # fmt: skip

FORMS: Sequence[str] = (
    "Explain {thing} to a ten-year-old.", "What is {thing}?", "Why does {thing} matter?",
    "Give me five facts about {thing}.", "Write a short paragraph about {thing}.",
    "How does {thing} work?", "What are common misunderstandings about {thing}?",
    "Summarise what you know about {thing} in three sentences.", "Write a haiku about {thing}.",
    "Write a four-line poem about {thing}.", "Describe {thing} with a metaphor.",
    "I have to give a talk on {thing}. Make an outline.", "Give three quiz questions about {thing} "
    "with answers.", "What is the history of {thing}?", "List the advantages and disadvantages of "
    "{thing}.", "Tell me something surprising about {thing}.", "Who should I read to learn more "
    "about {thing}?", "Define {thing} in one sentence.", "How has {thing} changed over time?",
    "What is the difference between {pair}?", "Compare {pair} in a table.",
    "Which is better: {pair}? Give reasons.", "What do {pair} have in common?",
    "Write a short story about {hero}.", "Write the first paragraph of a novel about {hero}.",
    "Write a dialogue between {hero} and a stranger.", "Tell me a bedtime story about {hero}.",
    "Suggest three titles for a story about {hero}.", "Write a limerick about {hero}.",
    "How can I {task}?", "Give me a step-by-step plan to {task}.", "What do I need to {task}?",
    "List ten tips to {task}.", "What are the biggest mistakes when people try to {task}?",
    "I want to {task}, but I have little time. What should I do?",
    "Make a weekly schedule so that I can {task}.",
    "Write a Python function that {program}.", "Write a JavaScript function that {program}.",
    "Show me a program that {program}, with comments.",
    "How would you test a function that {program}?",
    "Explain step by step a function that {program}.",
    "Write an email {letter}.", "Write a short, polite letter {letter}.",
    "Give me a subject line for an email {letter}.", "Correct this sentence: {sentence}",
    "Rewrite more formally: {sentence}", "Rewrite in simpler words: {sentence}",
    "Translate to French: {sentence}", "Translate to Spanish: {sentence}",
    "What is the main verb of this sentence? {sentence}", "Continue the text: {sentence}",
    "What should I see in {place}?", "Plan a three-day trip to {place}.", "What is {place} known "
    "for?", "What is the weather like in {place}?", "What food should I try in {place}?",
    "Write a postcard from {place}.", "Is {number} a prime number? Explain.",
    "What is {number} times {number}?", "A train travels {number} kilometres in {number} minutes. "
    "How fast is it?", "I have {number} apples and give away a third. How many are left?",
    "What are the factors of {number}?", "Convert {number} hours to minutes.",
    "Give me a recipe for {food}.", "What goes well with {food}?", "How long does it take to make "
    "{food}?", "Make a shopping list for {food}.", "How can I make {food} healthier?",
    "Act as a tour guide and tell me about {place}.",
    "Act as a teacher and ask me a question about {thing}.",
    "Make a JSON object that describes {thing}.",
    "Brainstorm names for a shop that sells {food}.", "Write an advertisement for {food}.",
    "Write a review of a trip to {place}.",
)  # fmt: skip

FOLLOW_UPS: Sequence[str] = (
    "Can you explain that in simpler words?", "Make it shorter.", "Give me an example.", "Why?",
    "Thank you! Anything else I should know?", "Write it again as a list.", "Tell me more.",
    "Now make it funnier.", "What is the most important point?", "Are you sure?",
)  # fmt: skip

HELD_OUT_SHARE = 0.2


def chat_prompts(count: int, *, held_out: bool, seed: int = 0) -> list[str]:
    """``count`` different prompts of the training set or of the held-out set."""
    rng = random.Random(f"{seed}-{held_out}")
    forms = _part(FORMS, held_out=held_out)
    subjects = {name: _part(values, held_out=held_out) for name, values in SUBJECTS.items()}
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        form = rng.choice(forms)
        for name, values in subjects.items():
            while f"{{{name}}}" in form:
                form = form.replace(f"{{{name}}}", rng.choice(values), 1)
        prompts[_varied(form, rng)] = None
    return list(prompts)


def follow_ups(count: int, seed: int = 0) -> Iterator[str]:
    """Second questions."""
    rng = random.Random(seed)
    return (rng.choice(FOLLOW_UPS) for _ in range(count))


def _part(values: Sequence[str], *, held_out: bool) -> list[str]:
    """The values of a set; which ones are held out does not depend on the prompts' seed."""
    order = list(values)
    random.Random(len(values)).shuffle(order)
    cut = max(1, round(HELD_OUT_SHARE * len(order)))
    return order[:cut] if held_out else order[cut:]


def _varied(text: str, rng: random.Random) -> str:
    """The prompt as people write it: some polite, some hasty, some with a wish of length."""
    draw = rng.random()
    if draw < 0.1:
        return "Please " + text[0].lower() + text[1:]
    if draw < 0.2:
        return text.lower().rstrip(".?")
    if draw < 0.3:
        return text + " " + rng.choice(("Be brief.", "Answer in detail.", "Use at most 50 words."))
    if draw < 0.35:
        return rng.choice(("Hi! ", "Hello. ", "Quick question: ")) + text
    return text
