"""The sentences of the small model's corpus, as a grammar: `{slot}` is a list of words or a name
that the story binds (`{hero}`, `{friend}`, `{home}`, `{goal}`, `{his}`).

`a(n)` becomes "a" or "an". Sentences need no capital letter at the start; the writer adds it.
"""

from __future__ import annotations

OPENING = (
    "once there was a(n) {heroadj} {herokind} who lived near the {home}.",
    "long ago, near the {home}, there lived a(n) {heroadj} {herokind}.",
    "a(n) {heroadj} {herokind} lived close to the {home}, where the days were quiet.",
    "this is the story of a(n) {heroadj} {herokind} who lived by the {home}.",
    "one {time} in {season}, a(n) {heroadj} {herokind} came to the {home}.",
    "everyone at the {home} knew the {heroadj} {herokind}.",
    "in a house beside the {home} lived a(n) {heroadj} {herokind}.",
    "there was once a(n) {heroadj} {herokind} who had never left the {home}.",
)
NAMING = (
    "the {herokind} was called {name}.",
    "{his} name was {name}.",
    "people called the {herokind} {name}.",
    "the name of the {herokind} was {name}, and it was a good name.",
    "friends called the {herokind} {name}.",
)
SCENE = (
    "the water was clear, and the {tree} stood still.",
    "the {weather} had gone, and the air was {air}.",
    "a light wind moved over the {place}.",
    "the {season} was long that year, and the {flower} grew beside the path.",
    "far away, a bell rang {num} times.",
    "the smell of fresh {food} came from the {place}.",
    "the wheel of the mill turned slowly, as it did every day.",
    "a(n) {colour} boat lay on the bank.",
    "above the {place} the sky was {colour}.",
    "the river ran fast after the rain.",
    "no one was on the road except a(n) {adj} {animal}.",
    "leaves fell from the {tree} into the water.",
    "the {place} was full of people and noise.",
    "smoke rose from the roof of the {place}.",
    "the moon stood over the {place} like a(n) {colour} lamp.",
    "the path from the {place} to the {place} was {pathadj}.",
)
WANT = (
    "more than anything, {hero} wanted to find {goal}.",
    "{hero} had lost {goal} and could not rest until it was found.",
    "one {time}, {hero} heard about {goal} that lay hidden near the {far}.",
    "every {time}, {hero} dreamed about {goal}.",
    "{hero} had promised to bring {goal} to the {far} before the {season} ended.",
    "one {weekday}, {goalthe} was gone, and {hero} did not know why.",
    "an old letter said that {goal} was waiting at the {far}.",
    "{hero} wanted to learn what {goalthe} was for.",
    "the {job} at the {far} asked {hero} to look for {goal}.",
)
SETOUT = (
    "so {hero} packed some {food} and set out for the {far}.",
    "{hero} got up before the sun and walked to the {far}.",
    "{hero} took a(n) {thingadj} {thing} and went on {his} way.",
    '"I will go," said {hero}, "even if it takes all {season}."',
    "the way to the {far} was {pathadj}, but {hero} was not afraid.",
    "{hero} followed the river for {num} hours.",
    "after breakfast {hero} closed the door and left the {home} behind.",
    "{hero} asked the way, and a(n) {animal} pointed to the {far}.",
)
TROUBLE = (
    "then the {weather} came, and {hero} could not see the path.",
    "at the {place} the bridge was broken.",
    "the door of the {far} was closed, and nobody answered.",
    "half way there, {hero} fell into a(n) {thingadj} hole and called for help.",
    "a(n) {adj} {animal} stood in the way and would not move.",
    "the night was cold, and {hero} had no light.",
    "the river was too wide to cross.",
    "soon {hero} was lost among the trees.",
    "the boat began to leak, and water came in from every side.",
    "the wind took the map and carried it over the {place}.",
)
MEET = (
    "just then a(n) {friendadj} {friendkind} came along.",
    "there {hero} met a(n) {friendadj} {friendkind}.",
    "a(n) {friendadj} {friendkind} heard the noise and came to look.",
    "behind the {tree} sat a(n) {friendadj} {friendkind}, eating {food}.",
    "in the middle of the night a(n) {friendadj} {friendkind} knocked at the door.",
    "on the other side waited a(n) {friendadj} {friendkind}.",
)
TALK = (
    '"why are you so {feeling}?" asked {friend}. "I am looking for {goal}," said {hero}.',
    '"can you help me?" asked {hero}. "of course I can," said {friend}.',
    '"where are you going?" asked {friend}. "to the {far}," said {hero}, "to find {goal}."',
    '"I know the way," said {friend}. "come with me."',
    '"you look {feeling}," said {friend}. "sit down and have some {food}."',
    '"two can do what one cannot," said {friend}, and {hero} agreed.',
    '"have you seen {goal}?" asked {hero}. "perhaps," came the answer.',
    '"the {far} is not far," said {friend}, "but you will need {virtue}."',
    '"what is your name?" asked {friend}. "my name is {name}," said {hero}.',
)
EFFORT = (
    "together they worked until the {time}.",
    "they tied a rope to the {tree} and pulled.",
    "{friend} carried the {thing}, and {hero} carried the {food}.",
    "they looked under every stone of the {place}.",
    "first they tried to go left, and then they tried to go right.",
    "{hero} listened, and far away there was the sound of a(n) {thing}.",
    "they counted to {num} and pushed the door together.",
    "they sang a song about the {place} so that the way would seem short.",
    "{friend} held up a(n) {thingadj} lantern, and the path was bright again.",
    "step by step they climbed to the top of the {far}.",
    "they rested under the {tree} and shared the last of the {food}.",
    "for {num} hours they walked through the {weather}.",
)
FIND = (
    "and there, under the {tree}, lay {goalthe}.",
    "at last they opened the door of the {far}, and inside they found {goalthe}.",
    "in the {far}, behind a(n) {thingadj} {thing}, they found {goalthe}.",
    "{friend} looked into the water. {goalthe} was shining at the bottom.",
    'then {hero} saw it. "look!" cried {hero}. "{goalthe}!"',
    "when the sun came up, {goalthe} lay on the path before them.",
    "the {job} of the {far} smiled and gave them {goalthe}.",
)
RETURN = (
    "they carried {goalthe} back to the {home}, and everyone was {feeling}.",
    "{hero} thanked {friend} and went home, {feeling} and {feeling}.",
    "that evening everybody at the {home} had {food} and {food}.",
    "{hero} showed {goalthe} to the {job}, who was very {feeling}.",
    "on the way home they laughed, although the road was {pathadj}.",
    "back at the {home}, {hero} put {goalthe} on the table where all could see it.",
    "{friend} stayed at the {home} for the whole {season}.",
)
CLOSING = (
    "from that day on, {hero} and {friend} were the best of friends.",
    "and that is how {hero} learned about {virtue}.",
    "since then, {hero} has never forgotten {friend}.",
    "and if you walk past the {home} today, you may still see them there.",
    "{hero} slept well that night.",
    "from then on, nobody at the {home} was afraid of the {weather}.",
    'and {hero} said, "the best thing I found was {virtue}."',
    "so the story ends, and the river runs on as before.",
)
FILLER = (
    "the {adj} {animal} walked along the {place} and looked for {food}.",
    "in {month} the {place} is quiet, and the {tree} gives some shade.",
    "the {job} opened the window and watched the {weather}.",
    "on {weekday} the children play near the {place} until the {time}.",
    "a(n) {thingadj} {thing} stood in the corner of the {place}.",
    "many people like {food} in {season}, and some like {food} as well.",
    "the {animal} and the {animal} slept through the {time}.",
    "nobody remembers who built the {place}.",
    "the {weather} came early, and the {job} stayed at home.",
    "there are {num} steps from the {place} to the {place}.",
    "the {flower} by the {place} opens in {month}.",
    "someone had left a(n) {colour} {thing} on the wall.",
    "the road goes past the {place}, over the {place} and down to the {place}.",
    "every {time} the {job} sweeps the floor and makes some tea.",
    "the {adj} {job} talked with the {adj} {job} about the {weather}.",
    "it was a(n) {air} {time} in {season}.",
    "the water turns the wheel, and the wheel turns the stone.",
    "a(n) {animal} called from the {tree}, and another answered.",
    "on day {n} the {job} counted {n} {many} by the {place}.",
    "the {job} ground {n} sacks of grain in {month}.",
)
# Lines of a diary, which differ only in their numbers: `{day}` counts up.
DIARY = (
    "on day {day} the {job} ground {n} sacks of grain by the {place}.",
    "on day {day} the {job} sold {n} {many} at the {place}.",
    "line {day}: {n} {many} passed the {place}.",
    "{day}. the {job} wrote down the number {n}.",
    "day {day}: the {job} had {food} and looked at the {weather} for {n} minutes.",
)
GATES = (
    "gate",
    "door",
    "tower",
    "barn",
    "cellar",
    "chapel",
    "stable",
    "bridge house",
    "boathouse",
    "library",
    "pantry",
    "attic",
    "workshop",
    "garden",
    "mill",
    "storehouse",
)
BOATS = (
    "Morning Star",
    "Blue Heron",
    "Silver Wave",
    "Swift Otter",
    "Red Lantern",
    "Quiet Water",
    "Golden Reed",
    "Evening Bell",
    "Little Swan",
    "North Wind",
    "White Feather",
    "Green Willow",
)
EXTRA: dict[str, tuple[str, ...]] = {
    "air": ("cold", "warm", "fresh", "still", "clear", "soft", "bright", "cool"),
    "pathadj": ("long", "steep", "narrow", "wet", "dark", "stony", "dusty", "old"),
}
# Facts that a question can ask for: (sentence, questions, answers).
FACTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "the key for the {side} {gate} is {colour}.",
        ("what is the key for the {side} {gate}?", "what colour is the key for the {side} {gate}?"),
        ("the key for the {side} {gate} is {colour}.",),
    ),
    (
        "the {adj} {animal} lives near the {place}.",
        ("where does the {adj} {animal} live?", "where can I find the {adj} {animal}?"),
        ("the {adj} {animal} lives near the {place}.",),
    ),
    (
        "{someone} works as a(n) {job}.",
        ("what is the work of {someone}?", "what does {someone} do?"),
        ("{someone} works as a(n) {job}.",),
    ),
    (
        "the favourite colour of {someone} is {colour}.",
        ("what is the favourite colour of {someone}?", "which colour does {someone} like best?"),
        ("the favourite colour of {someone} is {colour}.",),
    ),
    (
        "the code for room {room} is {code}.",
        ("what is the code for room {room}?", "which code opens room {room}?"),
        ("the code for room {room} is {code}.",),
    ),
    (
        "the boat of {someone} is called {boat}.",
        ("what is the boat of {someone} called?", "what is the name of the boat of {someone}?"),
        ("the boat of {someone} is called {boat}.",),
    ),
    (
        "the {flower} market opens on {weekday}.",
        ("when does the {flower} market open?", "on which day does the {flower} market open?"),
        ("the {flower} market opens on {weekday}.",),
    ),
    (
        "{someone} keeps the {thingadj} {thing} in the {place}.",
        ("where does {someone} keep the {thingadj} {thing}?", "where is the {thingadj} {thing}?"),
        ("{someone} keeps the {thingadj} {thing} in the {place}.",),
    ),
    (
        "for lunch {someone} eats {food}.",
        ("what does {someone} eat for lunch?", "what is the lunch of {someone}?"),
        ("for lunch {someone} eats {food}.",),
    ),
    (
        "{someone} was born in {month}.",
        ("when was {someone} born?", "in which month was {someone} born?"),
        ("{someone} was born in {month}.",),
    ),
    (
        "the secret word of the {adj} {job} is {word}.",
        (
            "what is the secret word of the {adj} {job}?",
            "which secret word does the {adj} {job} have?",
        ),
        ("the secret word of the {adj} {job} is {word}.",),
    ),
    (
        "{someone} has {num} {plural}.",
        ("how many {plural} does {someone} have?", "what number of {plural} has {someone}?"),
        ("{someone} has {num} {plural}.",),
    ),
)
