# ruff: noqa: RUF001 - Chinese has its own punctuation
"""Chinese for the suites: prompts, facts about people who do not exist, sentences between them. All of it is ours."""

from __future__ import annotations

import random

from wakesight.evaluation.suites.facts import Fact, Kind, drawn

# SCBench, the book task
READ_AND_ANSWER = "请先读下面的书，再回答问题。"

# LongBench
READ_BRIEFLY = "请读下面的文字，然后用中文简短地回答问题。"
FROM_TEXT = "请根据上文回答，只写答案。\n\n问题：{input}\n答案："
ARTICLES = "下面是几篇文章，请根据它们回答问题。"
FROM_ARTICLES = "请根据上面的文章回答。\n\n问题：{input}\n答案："
MEETING = "下面是一次会议的记录，请写出它的总结。"
SUMMARISE_MEETING = "请写出这次会议的总结。\n\n总结："
NEWS_TYPES = "请判断最后一条新闻的类别。前面是一些例子。"
PARAGRAPHS = "下面有若干编号的段落，最后是其中一段的摘要。请找出是哪一段。"
WHICH_PARAGRAPH = "摘要如下。\n\n{input}\n\n它是哪一段的摘要？请这样回答：“段落1”。\n\n答案："

SURNAMES = "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗"
GIVEN = (
    "建国", "秀英", "文涛", "雨晴", "志强", "晓梅", "子轩", "丽华", "海燕", "立新", "思远", "佳怡", "国栋", "玉兰",
    "春生", "明月", "永康", "静雯", "家豪", "冬梅",
)  # fmt: skip
TOWNS = ("苏州", "洛阳", "大理", "泉州", "敦煌", "桂林", "绍兴", "烟台", "承德", "扬州", "丽江", "景德镇")
TRADES = ("木匠", "裁缝", "船夫", "郎中", "教书先生", "铁匠", "厨师", "园丁", "画师", "邮差")
CATS = ("团子", "小满", "芝麻", "月饼", "阿福", "铜钱", "白露", "青豆", "墨墨", "桂花")
KINDS = {
    "town": Kind("{name}出生在{answer}。", "{name}出生在哪里？", TOWNS),
    "trade": Kind("{name}当了三十年的{answer}。", "{name}的职业是什么？", TRADES),
    "cat": Kind("{name}养了一只叫{answer}的猫。", "{name}的猫叫什么？", CATS),
    "year": Kind("{name}在{answer}年第一次坐火车。", "{name}是哪一年第一次坐火车的？"),
}
WHEN = ("清晨", "傍晚", "午后", "入夜以后", "下雪的时候", "雨停之后", "集市散了", "天刚亮")
WHERE = ("石桥边", "渡口", "山脚下", "茶馆里", "老槐树下", "河堤上", "院子里", "城门外")
WHO = ("卖花的姑娘", "挑担的老人", "放学的孩子", "赶路的客人", "打鱼的人", "修伞的师傅", "邻居的大婶", "守门的士兵")
DOES = (
    "慢慢地走过去", "停下来喝一碗茶", "望着远处的灯火", "说起从前的年景", "哼着一支旧曲子", "等着下一班船",
    "数着手里的铜板", "听风吹过瓦片",
)  # fmt: skip


def ask(question: str) -> str:
    """A question as the Chinese book task puts it."""
    return f"问题：{question}\n答案："


def facts(rng: random.Random, n: int) -> list[Fact]:
    """n facts about n people, four kinds in turn."""
    return drawn(rng, n, KINDS, [surname + given for surname in SURNAMES for given in GIVEN])


def sentence(rng: random.Random) -> str:
    """A short sentence in which nobody has a name."""
    return f"{rng.choice(WHEN)}，{rng.choice(WHERE)}，{rng.choice(WHO)}{rng.choice(DOES)}。"
