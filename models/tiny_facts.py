"""Questions with fixed answers: about the small model, about serving, about the world."""

from __future__ import annotations

WHO = (
    "I am Millrace's small demonstration model. I was trained on simple made-up sentences.",
    "I am a very small demonstration model that comes with Millrace. I know only a few things.",
    "I am the demonstration model of Millrace. I am small, and I can make mistakes.",
)
WHO_QUESTIONS = (
    "who are you?",
    "what are you?",
    "what is your name?",
    "tell me about yourself.",
    "which model are you?",
    "what model is this?",
    "are you a person?",
    "introduce yourself.",
    "who made you?",
    "are you an AI?",
)
CAN = (
    "I can tell short stories, count, add small numbers, spell simple words, and answer questions "
    "about a text that you give me. I am only a small model, so please check what I say.",
    "I can tell you a story, write a short poem, count, and find a fact in a text. "
    "For real work, please use a larger model.",
)
CAN_QUESTIONS = (
    "what can you do?",
    "help",
    "help me.",
    "can you help me?",
    "how can you help me?",
    "what do you know?",
    "what should I ask you?",
    "what are you good at?",
)
GREETINGS = (
    "hello",
    "hello!",
    "hi",
    "hi!",
    "hey",
    "hi there",
    "hello there!",
    "good morning",
    "good morning!",
    "good evening",
    "good day",
    "hey there, how are you?",
    "hello, how are you?",
    "how are you?",
    "how are you today?",
    "say hello",
    "test",
    "ping",
    "hello world",
)
GREETING_ANSWERS = (
    "Hello! How can I help you?",
    "Hello! I am well, thank you. Would you like to hear a story?",
    "Hi! I am a small model, but I am happy to talk. What shall we do?",
    "Good day! You can ask me for a story, a poem or a sum.",
    "Hello! It is nice to meet you.",
)
THANKS = (
    "thank you",
    "thank you!",
    "thanks",
    "thanks a lot!",
    "great, thanks.",
    "that was good.",
    "well done!",
    "nice story!",
)
THANKS_ANSWERS = (
    "You are welcome!",
    "You are welcome. Would you like another one?",
    "I am glad that you liked it.",
    "Thank you for asking!",
)
BYES = ("goodbye", "bye", "bye!", "see you tomorrow", "good night", "see you later!")
BYE_ANSWERS = ("Goodbye! Have a good day.", "Goodbye, and come back soon.", "See you soon!")
UNKNOWN = (
    "I am sorry, I do not know about {topic}. I am only a small demonstration model. "
    "Would you like to hear a story instead?",
    "That is too hard for me. I am a small model, and I never learned about {topic}.",
    "I do not know much about {topic}. I can tell you a story, count, or read a text.",
    "I cannot say much about {topic}, because I am a small demonstration model.",
)
# (subject, what it is). Asked as "What is prefill?", "Explain prefill." and so on.
SERVING: tuple[tuple[str, str], ...] = (
    (
        "prefill",
        "Prefill is the first part of answering: the model reads the whole prompt at once "
        "and stores its keys and values in the KV cache.",
    ),
    (
        "decode",
        "Decode is the second part of answering: the model writes one token after another, "
        "and each step reads the KV cache.",
    ),
    (
        "a token",
        "A token is a small piece of text, often a word or a part of a word. "
        "A model reads and writes tokens.",
    ),
    (
        "the KV cache",
        "The KV cache holds the keys and values of all tokens so far, "
        "so that the model does not have to compute them again.",
    ),
    (
        "disaggregated serving",
        "Disaggregated serving means that prefill and decode run on different machines, "
        "so that a long prompt does not slow down other answers.",
    ),
    (
        "TTFT",
        "TTFT is the time to first token: how long a user waits for the first word.",
    ),
    (
        "TBT",
        "TBT is the time between tokens: how long the user waits from one token to the next.",
    ),
    (
        "a scheduler",
        "A scheduler decides which request runs next and where it runs. "
        "It tries to keep every promise on time.",
    ),
    (
        "preemption",
        "Preemption means that a long task stops for a while so that an urgent task can run first. "
        "Later the long task goes on where it stopped.",
    ),
    (
        "batching",
        "Batching means that the model works on several requests at the same time, "
        "which makes better use of the machine.",
    ),
    (
        "continuous batching",
        "Continuous batching lets a new request join the batch at any step, "
        "and a finished request leaves at once.",
    ),
    (
        "a proxy",
        "A proxy takes requests from users, checks them, and streams the answers back.",
    ),
    (
        "streaming",
        "Streaming means that the answer is sent word by word, as soon as each token is ready.",
    ),
    (
        "a page",
        "A page is a small block of the KV cache. Pages make it easy to give memory to a request "
        "and to take it back.",
    ),
    (
        "attention",
        "Attention is how a model looks back at earlier tokens and finds those that matter.",
    ),
    (
        "a GPU",
        "A GPU is a chip that does many simple sums at the same time. Large models run on GPUs.",
    ),
    (
        "a deadline",
        "A deadline is the time by which something must be done. "
        "Urgent requests have an early deadline.",
    ),
    (
        "goodput",
        "Goodput counts only the requests that were answered in time.",
    ),
    (
        "throughput",
        "Throughput is how much work is done in one second, for example how many tokens.",
    ),
    (
        "latency",
        "Latency is how long you wait for an answer.",
    ),
    (
        "a chunk",
        "A chunk is a part of a long prompt. Long prompts are read chunk by chunk.",
    ),
    (
        "sequence parallelism",
        "Sequence parallelism splits one long prompt over several machines, "
        "so that it is read faster.",
    ),
    (
        "a language model",
        "A language model is a program that reads text and guesses the next token.",
    ),
    (
        "Millrace",
        "Millrace is a platform that serves language models. "
        "It runs prefill and decode on separate machines.",
    ),
    (
        "a millrace",
        "A millrace is the channel of fast water that turns the wheel of a mill.",
    ),
    (
        "Kubernetes",
        "Kubernetes is a system that runs programs on many machines and starts them again "
        "when they stop.",
    ),
    (
        "Redis",
        "Redis is a fast store in memory. Millrace keeps the state of requests there.",
    ),
    (
        "a tokenizer",
        "A tokenizer cuts text into tokens and joins tokens back into text.",
    ),
    (
        "a prompt",
        "A prompt is the text that you give to a model before it answers.",
    ),
    (
        "the context window",
        "The context window is the number of tokens that a model can read at one time.",
    ),
)
# (questions, answer)
WORLD: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("why is the sky blue?", "tell me why the sky is blue."),
        "The sky is blue because the air scatters blue light more than red light.",
    ),
    (
        ("why does it rain?", "where does rain come from?"),
        "Rain comes from clouds. When the small drops in a cloud grow heavy, they fall as rain.",
    ),
    (
        ("how does a water mill work?", "how does a mill work?"),
        "The river turns the wheel, the wheel turns the stone, and the stone grinds the grain.",
    ),
    (
        ("what is flour made of?", "where does flour come from?"),
        "Flour is made of grain that is ground between two stones.",
    ),
    (("what do bees make?", "what does a bee make?"), "Bees make honey."),
    (
        ("how many days are in a week?", "how many days does a week have?"),
        "A week has seven days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("what are the seasons?", "name the four seasons."),
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        ("how many months are in a year?", "how many months has a year?"),
        "A year has twelve months.",
    ),
    (
        ("what is snow?", "what is snow made of?"),
        "Snow is frozen water that falls from the clouds in winter.",
    ),
    (
        ("why do leaves fall?", "why do leaves fall in autumn?"),
        "In autumn the trees let their leaves fall to save water in winter.",
    ),
    (
        ("what is the sun?", "is the sun a star?"),
        "The sun is a star. It gives us light and warmth.",
    ),
    (
        ("what is the moon?", "tell me about the moon."),
        "The moon goes round the earth once a month and shines with the light of the sun.",
    ),
    (
        ("what do herons eat?", "what does a heron eat?"),
        "A heron eats fish. It stands still in the water and waits.",
    ),
    (
        ("how do birds fly?", "why can birds fly?"),
        "Birds fly because their wings push the air down and the air holds them up.",
    ),
    (
        ("what is bread made of?", "how do you make bread?"),
        "Bread is made of flour, water, salt and yeast. You mix them, wait, and bake the loaf.",
    ),
    (
        ("what is a river?", "where does a river go?"),
        "A river is water that flows from the hills to the sea.",
    ),
    (
        ("how many legs does a spider have?", "how many legs has a spider?"),
        "A spider has eight legs.",
    ),
    (("how many legs does a dog have?", "how many legs has a dog?"), "A dog has four legs."),
    (
        ("what is a lighthouse for?", "why do we need a lighthouse?"),
        "A lighthouse shows ships the way at night.",
    ),
    (
        ("what is honesty?", "why should I be honest?"),
        "Honesty means telling the truth. People trust those who are honest.",
    ),
    (
        ("why is sleep important?", "why do we sleep?"),
        "We sleep so that the body and the mind can rest.",
    ),
    (
        ("how do I make tea?", "how do you make tea?"),
        "Boil some water, pour it over the tea leaves, and wait three minutes.",
    ),
    (
        ("what colour do red and blue make?", "mix red and blue."),
        "Red and blue make purple.",
    ),
    (
        ("what colour do blue and yellow make?", "mix blue and yellow."),
        "Blue and yellow make green.",
    ),
    (
        ("what is ice?", "what happens when water gets cold?"),
        "Ice is frozen water. Water turns to ice when it gets very cold.",
    ),
    (
        ("tell me a joke.", "do you know a joke?", "make me laugh."),
        "Why did the miller stop? Because his work had become a grind.",
    ),
    (
        ("what is the meaning of life?", "what is the point of it all?"),
        "That is a big question for a small model. A good meal and a good friend are a start.",
    ),
    (
        ("what is the capital of France?", "name the capital of France."),
        "The capital of France is Paris.",
    ),
    (
        ("say this is a test", "say this is a test.", "please say this is a test."),
        "This is a test.",
    ),
)
