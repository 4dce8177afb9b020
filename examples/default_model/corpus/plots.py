"""The plots of the stories: their sentences, their order and the sentences that short stories keep.

A plot has templates for stories of one and two sentences and twelve slots for longer ones. A slot
is (rank, templates): a story of n sentences keeps exactly the slots of rank <= n, in order. The
first use of a field introduces it ("a little fox named Ruby", then "Ruby"), so that every subset
reads well. The fields are {h} hero, {f} friend, {o} thing, {p} "in the forest", {to} "to the
forest", {skill}, {food}, {plant}, and {he} {his} {him} for the hero. Templates have no full stop.
"""

from typing import NamedTuple


class Plot(NamedTuple):
    name: str
    one: tuple[str, ...]
    two: tuple[str, ...]  # the second sentence of a two-sentence story
    slots: tuple[tuple[int, tuple[str, ...]], ...]
    asks: tuple[tuple[int, tuple[str, ...], str], ...]  # (required rank, questions, answer)


FOUND = Plot(
    "found",
    (
        "One day {h} found {o} {p} and gave it back to {f}",
        "Once {h} found {o} {p} and shared it with {f}",
    ),
    (
        "{h} found {o} and gave it to {f}",
        "One day {h} saw {o} in the grass and gave it to {f}",
    ),
    (
        (1, ("Once upon a time there was {h}", "There once was {h}", "This is a story about {h}")),
        (6, ("{h} lived {p} and liked to go for long walks", "{h} lived {p} in a small house")),
        (5, ("One morning the sun was warm and {h} went outside", "One day {h} woke up early")),
        (2, ("Under a bush {h} found {o}", "{h} looked down and found {o}")),
        (8, ("It was the nicest thing {h} had ever seen", "{he} had never seen one like it")),
        (7, ("{h} asked everyone who had lost it", "{he} wanted to know who had lost it")),
        (9, ("Nobody knew the answer, but {h} did not give up", "{he} looked and looked all day")),
        (4, ("Then {h} met {f}, who looked very sad", "At last {h} met {f}, who was crying")),
        (10, ("{f} had lost something and could not find it", "{f} had been looking for hours")),
        (3, ("{h} gave {o} to {f} with a smile", "{h} handed {o} to {f} and smiled")),
        (11, ("{f} jumped for joy and said thank you", "{f} was so happy and danced around")),
        (12, ("From that day on they were best friends", "Since then they have played every day")),
    ),
    (
        (2, ("What did {h} find?", "What was found in the story?"), "{h} found {oa}."),
        (3, ("Who got {o}?", "Who did {h} give {o} to?"), "{h} gave {o} to {f}."),
        (6, ("Where did {h} live?", "Where does {h} live?"), "{h} lived {p}."),
    ),
)

LOST = Plot(
    "lost",
    (
        "One day {h} lost {o} {p}, but {f} found it again",
        "When {h} lost {o} {p}, {f} helped to find it",
    ),
    (
        "One day it was lost {p}, but {f} found it again",
        "It got lost {p}, but {f} helped to find it",
    ),
    (
        (1, ("Once there was {h} who had {o}", "There was once {h} who loved {o}")),
        (7, ("{h} took it everywhere", "{he} played with it every day")),
        (2, ("One day it was lost {p}", "Then one day it got lost {p}")),
        (5, ("{h} looked here and there, but it was gone", "{he} looked under every stone")),
        (8, ("{he} sat down and felt very sad", "A big tear ran down {his} cheek")),
        (4, ("Just then {f} came along", "Soon {f} came by and wanted to help")),
        (9, ("{h} told {f} everything", "{f} listened to the whole story")),
        (6, ("They looked for it together", "Together they looked in every corner")),
        (10, ("The sun went down and it got cold", "It grew dark and the stars came out")),
        (3, ("In the end {f} found {o} behind a tree", "At last {f} saw {o} in the grass")),
        (11, ("{h} laughed and hugged {f}", "{h} thanked {f} again and again")),
        (12, ("They walked home hand in hand", "That night {h} slept very well")),
    ),
    (
        (2, ("What did {h} lose?", "What was lost?"), "{h} lost {oa}."),
        (2, ("Where was {o} lost?", "Where did {h} lose {o}?"), "{h} lost {o} {p}."),
        (3, ("Who found {o}?", "Who found the {ox} in the end?"), "{f} found {o}."),
    ),
)

HELP = Plot(
    "help",
    (
        "One day {h} helped {f} out of a deep hole {p}",
        "When {f} fell into a hole {p}, {h} helped with a long rope",
    ),
    (
        "There {h} saw {f} in a deep hole and helped with a long rope",
        "{h} met {f}, who was stuck in a hole, and helped to get out",
    ),
    (
        (1, ("One day {h} went for a walk {p}", "It was a fine day and {h} was walking {p}")),
        (6, ("The birds were singing and the sky was blue", "The air was fresh and sweet")),
        (8, ("Suddenly {h} heard a small voice", "All at once there was a strange sound")),
        (2, ("There {h} saw {f} in a deep hole", "{h} saw {f}, who had fallen into a hole")),
        (5, ("{f} could not get out alone", "{f} was too tired to climb out")),
        (9, ("{h} thought about it for a while", "{he} walked around the hole and thought")),
        (7, ("Then {he} had a good idea", "At last {he} knew what to do")),
        (4, ("{h} ran home and brought a long rope", "{he} took a long rope from {his} bag")),
        (10, ("It was hard work, but {he} pulled and pulled", "{he} pulled with all {his} might")),
        (3, ("{h} helped {f} to climb out", "Soon {f} was out and safe, thanks to {h}")),
        (11, ("{f} gave {h} {o} to say thank you", "To say thank you, {f} gave {h} {o}")),
        (12, ("They are friends to this day", "They laughed and went home together")),
    ),
    (
        (2, ("Who was in the hole?", "Who fell into the hole?"), "{f} was in the hole."),
        (3, ("Who helped {f}?", "Who did help {f}?"), "{h} helped {f}."),
        (4, ("What did {h} use to help?", "What did {h} bring?"), "{h} brought a long rope."),
        (11, ("What did {f} give {h}?", "What did {h} get?"), "{f} gave {h} {oa}."),
    ),
)

JOURNEY = Plot(
    "journey",
    (
        "Once {h} walked a long way {to} and found a new friend, {f}",
        "One summer {h} went {to} and met {f} there",
    ),
    (
        "After a long way {h} stood {p} and was happy",
        "After many days {h} came {to} and met {f} there",
    ),
    (
        (
            1,
            (
                "Once there was {h} who wanted to go {to}",
                "There was once {h} who dreamed of a trip",
            ),
        ),
        (7, ("{he} had heard that it was beautiful there", "{he} had only seen it in pictures")),
        (5, ("{h} packed some bread and {o}", "{he} put {o} into a bag and left")),
        (2, ("Early one morning {h} went on the long way {to}", "So {h} set out {to}")),
        (8, ("The road was long and full of stones", "The way went up and down")),
        (6, ("At noon the rain came, but {h} walked on", "A cold wind blew, but {h} was brave")),
        (4, ("On the way {h} met {f}", "Half way there {h} met {f}")),
        (9, ("They shared the bread and told each other jokes", "They sang songs as they walked")),
        (10, ("{f} knew a short way through the hills", "{f} showed the way at every corner")),
        (3, ("At last {h} stood {p} and was happy", "In the end {h} came {to} and was happy")),
        (11, ("It was even more beautiful than a dream", "The light of the evening was golden")),
        (12, ("{h} came home with many stories to tell", "{he} never forgot that day")),
    ),
    (
        (2, ("Where did {h} go?", "Where did {h} want to go?"), "{h} went {to}."),
        (4, ("Who did {h} meet?", "Who did {h} meet on the way?"), "{h} met {f}."),
        (5, ("What did {h} take along?", "What was in the bag?"), "{h} took {oa}."),
    ),
)

FEAST = Plot(
    "feast",
    (
        "One evening {h} made {food} {p} and ate it with {f}",
        "Once {h} cooked {food} and shared it with {f} {p}",
    ),
    (
        "Then {h} and {f} cooked it together and ate it all",
        "{f} came to help, and it was the best meal ever",
    ),
    (
        (1, ("Once {h} wanted to make {food}", "One day {h} had a wish for {food}")),
        (6, ("{he} lived {p} in a house with a red door", "{his} kitchen {p} was small and warm")),
        (7, ("{h} looked into the cupboard", "{he} opened the big cupboard")),
        (2, ("But there was no salt left in the house", "But all the salt was gone")),
        (8, ("Without salt it would not taste good", "{he} did not know what to do")),
        (3, ("Luckily {f} had some salt and brought it", "Then {f} came and brought some salt")),
        (9, ("{h} was very glad and opened the door wide", "{h} clapped and laughed")),
        (5, ("They cooked and stirred together", "They worked side by side and sang")),
        (10, ("Soon the whole house smelled wonderful", "The smell went out of the window")),
        (4, ("Then {h} and {f} ate {food} together", "{h} and {f} sat down and ate it all")),
        (11, ("{f} said it was the best meal ever", "{f} asked for more three times")),
        (12, ("After that they cooked together every week", "They washed the dishes and laughed")),
    ),
    (
        (2, ("What was missing?", "What was gone?"), "The salt was gone."),
        (2, ("What did {h} want to make?", "What did {h} make?"), "{h} made {food}."),
        (3, ("Who brought the salt?", "Who had some salt?"), "{f} brought the salt."),
    ),
)

STORM = Plot(
    "storm",
    (
        "When a storm came, {h} and {f} waited together in a dry cave until the sun came back",
        "One night a storm came, and {h} took {f} into a warm house {p}",
    ),
    (
        "{h} waited in a dry cave with {f} until the sun came back",
        "{h} and {f} ran to a dry cave and told each other stories",
    ),
    (
        (
            1,
            (
                "One day {h} was {p} when dark clouds came",
                "{h} was playing {p} when the sky got dark",
            ),
        ),
        (5, ("The wind blew hard and the leaves flew", "The wind grew stronger and stronger")),
        (2, ("Soon a great storm began", "Then a great storm came")),
        (7, ("{h} was cold and wet", "The rain fell on {his} head like little stones")),
        (6, ("{he} ran as fast as {he} could", "{he} looked for a dry place")),
        (3, ("{h} found a dry cave and waited there", "At last {h} came to a dry cave")),
        (4, ("In the cave sat {f}", "{f} was already in the cave")),
        (8, ("They were both a little afraid", "The thunder was very loud")),
        (9, ("{f} made a small fire to keep warm", "{f} told a funny story to pass the time")),
        (10, ("They shared a piece of bread", "{h} shared {his} last apple")),
        (11, ("Then the rain stopped and the sun came out", "In the morning the storm was over")),
        (12, ("A rainbow stood in the sky and they danced", "They went home as good friends")),
    ),
    (
        (2, ("What came?", "What was the weather like?"), "A great storm came."),
        (3, ("Where did {h} wait?", "Where did {h} hide?"), "{h} waited in a dry cave."),
        (4, ("Who was in the cave?", "Who sat in the cave?"), "{f} was in the cave."),
    ),
)

LEARN = Plot(
    "learn",
    (
        "Once {h} wanted to {skill}, and with the help of {f} it worked in the end",
        "One summer {f} taught {h} to {skill} {p}",
    ),
    (
        "Then {f} came to help, and soon {h} could {skill} very well",
        "With the help of {f} it worked in the end",
    ),
    (
        (1, ("Once there was {h} who wanted to {skill}", "There was {h} who could not {skill}")),
        (5, ("All the others {p} could do it", "Every day {he} saw the others do it {p}")),
        (4, ("{h} tried, but it did not work", "{he} tried once, and it went wrong")),
        (7, ("{he} tried again, and again it went wrong", "The next day it was no better")),
        (8, ("Some of the others laughed", "{h} was close to tears")),
        (2, ("Then {f} offered to help", "One day {f} came to help")),
        (6, ("{f} was very patient", "{f} showed every step slowly")),
        (9, ("They practised every morning", "They practised from noon until night")),
        (10, ("Little by little it got better", "Each day it was a little easier")),
        (3, ("In the end {h} could {skill} very well", "At last {h} learned to {skill}")),
        (11, ("Everyone clapped and cheered", "{f} was so proud and gave {h} {o}")),
        (12, ("Now {h} teaches the little ones", "{h} never gave up again")),
    ),
    (
        (2, ("What did {h} want to do?", "What did {h} want to learn?"), "{h} wanted to {skill}."),
        (2, ("Who helped {h}?", "Who came to help?"), "{f} helped {h}."),
    ),
)

GARDEN = Plot(
    "garden",
    (
        "One spring {h} planted a seed {p}, and it grew into {planta}",
        "Once {h} and {f} planted a seed, and it grew into {planta}",
    ),
    (
        "{h} planted it {p}, and it grew into {planta}",
        "{h} gave it water every day, and it grew into {planta}",
    ),
    (
        (1, ("One day {h} found a tiny seed", "In spring {h} got a tiny seed as a gift")),
        (5, ("{he} did not know what it would be", "It was as small as a grain of sand")),
        (2, ("{h} planted it {p}", "So {h} put it into the soil {p}")),
        (4, ("Every day {he} gave it some water", "{he} watered it every morning")),
        (7, ("For a long time nothing happened", "Days went by and nothing could be seen")),
        (8, ("{h} was sad, but {he} waited", "{he} sang songs to the seed")),
        (6, ("{f} came and told {him} to be patient", "Then {f} came and helped to pull weeds")),
        (9, ("One morning there was a small green leaf", "Then a green tip came out")),
        (10, ("It grew and grew in the warm sun", "Soon it was as tall as {h}")),
        (3, ("In summer it became {planta}", "It grew into {planta}")),
        (11, ("Everyone came to look at it", "{h} was proud and called all the neighbours")),
        (
            12,
            ("In autumn {h} kept a new seed for next year", "{h} gave a new seed to every friend"),
        ),
    ),
    (
        (2, ("What did {h} plant?", "What was planted?"), "{h} planted a seed."),
        (3, ("What did the seed become?", "What grew from the seed?"), "It became {planta}."),
        (4, ("How often did {h} water it?", "When was it watered?"), "{h} watered it every day."),
    ),
)

PLOTS = (FOUND, LOST, HELP, JOURNEY, FEAST, STORM, LEARN, GARDEN)
