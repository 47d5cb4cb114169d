"""The words of the small model's corpus: plain lists, and nothing that computes.

Every list is a slot of the grammar in `tiny_grammar.py`: `{animal}` draws from ANIMAL and so on.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


ANIMAL = _words(
    """heron, otter, fox, badger, hare, owl, duck, goose, swan, crow, robin, wren, kingfisher, mole,
    vole, hedgehog, squirrel, deer, stag, goat, sheep, lamb, cow, horse, pony, donkey, dog, cat,
    kitten, puppy, mouse, rat, frog, toad, newt, trout, salmon, pike, eel, bee, beetle, spider,
    snail, moth, swallow, magpie, raven, hawk, falcon, eagle, bear, wolf, lynx, beaver, bat,
    rabbit, hen, rooster, pigeon, turtle"""
)
CHARACTER = _words(
    """robot, dragon, wizard, princess, prince, king, queen, knight, giant, ghost, pirate, sailor,
    teapot, lantern, scarecrow, snowman, cloud, train, tractor, clock, river, mountain, star, moon,
    whale, penguin, elephant, lion, tiger, monkey, parrot, dolphin, camel, panda, unicorn, witch,
    astronaut, computer, engineer, scientist, teacher, child, boy, girl, farmer, programmer"""
)
JOB = _words(
    """miller, baker, farmer, fisherman, weaver, carpenter, potter, shepherd, gardener, teacher,
    doctor, tailor, painter, smith, sailor, cook, driver, singer, writer, librarian, postman,
    beekeeper, clockmaker, boatman, engineer, nurse, builder, shopkeeper, musician, mason"""
)
NAME = _words(
    """Anna, Ben, Clara, David, Ella, Finn, Greta, Henry, Ida, Jonas, Kate, Leo, Mira, Nils, Olive,
    Peter, Rosa, Simon, Tessa, Victor, Wanda, Martha, Oscar, Nora, Emil, Hanna, Jack, Lena, Max,
    Paul, Ruth, Sam, Tom, Vera, Will, Alice, Bruno, Edith, Frank, Grace, Hugo, Iris, Karl, Lucy,
    Mary, Otto, Robert, Sara, Theo, Zoe"""
)
FEMALE = frozenset(
    _words(
        """Anna, Clara, Ella, Greta, Ida, Kate, Mira, Olive, Rosa, Tessa, Wanda, Martha, Nora,
        Hanna, Lena, Ruth, Vera, Alice, Edith, Grace, Iris, Lucy, Mary, Sara, Zoe"""
    )
)
COLOUR = _words(
    """red, blue, green, yellow, white, black, brown, grey, silver, golden, amber, violet, orange,
    pink, purple, scarlet, copper, ivory, crimson, turquoise"""
)
ADJ = _words(
    """small, old, young, quiet, brave, gentle, clever, curious, patient, shy, proud, kind, tired,
    cheerful, careful, hungry, lonely, friendly, wise, stubborn, merry, sleepy, quick, slow, tall,
    thin, strong, honest, thoughtful, playful"""
)
THING_ADJ = _words(
    """small, old, heavy, bright, broken, lost, shiny, round, wooden, painted, dusty, plain,
    strange, little, narrow, warm, cold, forgotten, beautiful, simple"""
)
THING = _words(
    """bell, key, lantern, boat, basket, rope, map, letter, book, clock, wheel, drum, flute, kite,
    coat, hat, scarf, blanket, cup, bowl, spoon, kettle, ladder, hammer, bucket, barrel, chest,
    mirror, ring, coin, stone, feather, shell, seed, apple, loaf, cake, candle, ribbon, button,
    needle, saddle, oar, sail, net, bridge, chair, table, door, window, whistle, violin, compass,
    box, bag, broom, cart, sack, pencil, lamp"""
)
PLACE = _words(
    """old mill, river, mill pond, stone bridge, village, market, forest, meadow, hill, harbour,
    lighthouse, orchard, garden, barn, farm, church, school, library, bakery, tower, castle, cave,
    lake, marsh, island, valley, waterfall, quarry, station, inn, workshop, field, beach, cliff,
    well, mountain path, willow tree, oak wood, ferry, boathouse"""
)
BUILDING = _words(
    """old mill, church, lighthouse, barn, farm, school, library, bakery, tower, castle, cave,
    station, inn, workshop, boathouse, chapel, storehouse, museum, windmill, old tower"""
)
SIDE = _words(
    "north, south, east, west, upper, lower, inner, outer, old, new, left, right, main, back"
)
FOOD = _words(
    """bread, soup, apples, pears, plums, cheese, honey, butter, eggs, nuts, berries, porridge,
    cake, pie, fish, carrots, turnips, beans, onions, milk, tea, jam, mushrooms, potatoes,
    cherries"""
)
TREE = _words(
    "willow, oak, ash, birch, pine, elm, maple, apple tree, pear tree, beech, alder, hazel"
)
FLOWER = _words(
    "daisy, rose, lily, violet, poppy, clover, iris, tulip, primrose, bluebell, thistle"
)
DAY = _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTH = _words(
    """January, February, March, April, May, June, July, August, September, October, November,
    December"""
)
SYLLABLE = _words(
    "ka, lo, mi, ter, son, va, del, pri, gan, sto, ple, re, un, ing, ex, tra, com, fi, nal, ba, dur"
)
SEASON = _words("spring, summer, autumn, winter")
WEATHER = _words("rain, snow, fog, wind, sunshine, frost, thunder, mist, hail, cloud")
TIME = _words("morning, evening, afternoon, night")
FEELING = _words(
    """happy, glad, proud, calm, surprised, worried, tired, hopeful, grateful, curious, excited,
    sad, brave, lonely, peaceful, sure"""
)
VIRTUE = _words(
    """patience, kindness, courage, honesty, friendship, hard work, hope, trust, care, listening,
    sharing, good humour, rest, curiosity, practice"""
)
ANY_NOUN = _words(
    """quantum physics, football, the stock market, my homework, the president, cooking pasta, cars,
    history, philosophy, chess, space travel, the weather tomorrow, movies, music theory, biology,
    politics, medicine, algebra, poetry, economics, travel to Japan, photography, robots, religion,
    the internet, video games, dinosaurs, volcanoes, fashion, dancing, law, art, geography, Python,
    databases, networks, compilers, encryption, climate, gardening, swimming, languages, tax,
    the theory of everything, a good restaurant, my computer, this file"""
)
OPPOSITE = tuple(
    tuple(pair.split())
    for pair in _words(
        "hot cold,big small,tall short,fast slow,up down,in out,day night,light dark,happy sad,"
        "open closed,full empty,early late,hard soft,old young,near far,rich poor,wet dry,"
        "loud quiet,high low,strong weak,thick thin,true false,left right,"
        "long short,clean dirty,heavy light,first last,good bad,"
        "wide narrow,deep shallow,sharp blunt,rough smooth,sweet sour,"
        "brave afraid,new old,front back,top bottom,warm cool,begin end,push pull,give take,"
        "buy sell,win lose,float sink,laugh cry,ask answer,come go,summer winter"
    )
)
PLURAL = tuple(
    tuple(pair.split())
    for pair in _words(
        "goose geese,hen hens,sheep sheep,goat goats,cow cows,horse horses,duck ducks,dog dogs,"
        "cat cats,pigeon pigeons,rabbit rabbits,swan swans,boat boats,lantern lanterns,"
        "clock clocks,basket baskets,barrel barrels,mouse mice,child children,loaf loaves"
    )
)
NUMBER = _words(
    """zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,
    fourteen, fifteen, sixteen, seventeen, eighteen, nineteen, twenty"""
)
ANIMAL_COLOUR = {
    "heron": "grey",
    "fox": "red",
    "swan": "white",
    "crow": "black",
    "frog": "green",
    "bear": "brown",
    "robin": "brown with a red breast",
    "kingfisher": "blue and orange",
    "badger": "black and white",
    "bee": "black and yellow",
    "raven": "black",
    "otter": "brown",
    "lamb": "white",
    "magpie": "black and white",
    "salmon": "silver",
    "hare": "brown",
    "mole": "black",
    "wolf": "grey",
}
ANIMAL_HOME = {
    "heron": "by the river",
    "otter": "in the river bank",
    "fox": "in a den",
    "badger": "in a sett under the hill",
    "owl": "in a hollow tree",
    "duck": "on the pond",
    "bee": "in a hive",
    "bear": "in the forest",
    "frog": "near the pond",
    "mole": "under the ground",
    "rabbit": "in a burrow",
    "beaver": "in a lodge of sticks",
    "eagle": "high in the mountains",
    "trout": "in clear cold water",
    "bat": "in a cave",
    "hen": "in the farm yard",
    "spider": "in a web",
    "squirrel": "high in a tree",
}
SOUND = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "sheep": "bleats",
    "duck": "quacks",
    "owl": "hoots",
    "frog": "croaks",
    "horse": "neighs",
    "bee": "buzzes",
    "wolf": "howls",
    "crow": "caws",
    "rooster": "crows",
    "mouse": "squeaks",
    "goose": "honks",
    "lion": "roars",
}
SLOTS: dict[str, tuple[str, ...]] = {
    "animal": ANIMAL,
    "character": CHARACTER,
    "job": JOB,
    "someone": NAME,
    "colour": COLOUR,
    "adj": ADJ,
    "thingadj": THING_ADJ,
    "thing": THING,
    "place": PLACE,
    "food": FOOD,
    "tree": TREE,
    "flower": FLOWER,
    "weekday": DAY,
    "month": MONTH,
    "season": SEASON,
    "weather": WEATHER,
    "time": TIME,
    "feeling": FEELING,
    "virtue": VIRTUE,
    "num": NUMBER[2:],
    "n": tuple(str(n) for n in range(2, 100)),
    "many": tuple(pair[1] for pair in PLURAL),
}
