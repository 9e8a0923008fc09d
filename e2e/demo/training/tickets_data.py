"""Support tickets with their labels, made from parts with a seed.

Each ticket is a problem (which fixes the category) said in one of several ways, with a circumstance (which fixes the
priority). The parts are disjoint from the held-out prompts in `held_out.json`.
"""

import json
import random

PROBLEMS = {
    "billing": [
        "I was charged twice for my subscription",
        "my invoice shows the wrong amount",
        "the refund you promised has not reached my bank",
        "my credit card was declined although it is valid",
        "there is a fee on my bill that I do not recognise",
        "the discount code was not applied to my order total",
        "I need a VAT receipt for last month's payment",
        "you billed me after I cancelled my plan",
        "the price on the invoice differs from the quote",
        "my yearly plan renewed without any notice",
        "I paid by bank transfer but the account still says unpaid",
        "the invoice was sent in the wrong currency",
    ],
    "technical": [
        "the app crashes when I open the settings page",
        "the export button does nothing",
        "uploads stop at ninety percent",
        "your API returns error 500 for every call",
        "the dashboard stays blank after loading",
        "search results never appear",
        "notifications arrive hours late",
        "the printer driver does not install",
        "video calls freeze after a minute",
        "sync between my phone and laptop is broken",
        "the page takes a minute to load",
        "the latest update broke the dark theme",
    ],
    "account": [
        "I cannot log in to my account",
        "the password reset mail never comes",
        "my account is locked after too many attempts",
        "I want to change the email address of my profile",
        "please delete my account and all my data",
        "the two factor code is rejected",
        "someone else seems to use my login",
        "I cannot add a colleague to our team account",
        "my user name is shown wrongly",
        "I lost the phone with my authenticator app",
        "my profile picture cannot be changed",
        "I was signed out on all devices",
    ],
    "shipping": [
        "my parcel has not arrived",
        "the package came with a broken box",
        "the courier delivered to the wrong address",
        "tracking has not changed for a week",
        "I received the wrong item",
        "one item is missing from the delivery",
        "please send my order to a new address",
        "the delivery date keeps moving",
        "the driver left the parcel in the rain",
        "customs returned my package",
        "the order still says preparing",
        "half of the bottles in the crate were smashed",
    ],
    "feature": [
        "could you add a calendar view",
        "it would be nice to have keyboard shortcuts",
        "please support export to spreadsheet files",
        "I wish I could sort the list by name",
        "can you offer the app in Spanish",
        "a widget for the home screen would be great",
        "please let us colour the labels",
        "an integration with our chat tool would help",
        "I would like an offline mode",
        "could you show the total on the first page",
        "please add a way to archive old projects",
        "a bigger font option would be welcome",
    ],
}

CIRCUMSTANCES = {
    "high": [
        "This is urgent, we lose money every hour.",
        "Our whole team is blocked, please fix it now!",
        "I need this solved today.",
        "Production is down because of this.",
        "It is an emergency.",
        "My customers are waiting, act immediately.",
    ],
    "medium": [
        "Please have a look this week.",
        "It is annoying but I can work around it.",
        "I would be glad of an answer in the next days.",
        "This happens now and then.",
        "Can you check what went wrong?",
        "I would like to know what to do.",
    ],
    "low": [
        "There is no hurry.",
        "Just a thought for some day.",
        "Whenever you have time.",
        "It is a small thing.",
        "Not important, only curious.",
        "This can wait.",
    ],
}

OPENINGS = ["", "Hello, ", "Hi there, ", "Dear support, ", "Good morning. ", "Hi, "]
CLOSINGS = ["", "", " Thanks!", " Kind regards, Ana", " Thank you.", " Order 48213."]


def sentence(text):
    return text[0].upper() + text[1:]


def examples(seed, per_problem=5):
    """Pairs of ticket and label. Priorities come in turn, so that each category has all three."""
    rng = random.Random(seed)
    pairs = []
    for category, problems in PROBLEMS.items():
        for index, problem in enumerate(problems):
            for turn in range(per_problem):
                priority = ["high", "medium", "low"][(index + turn) % 3]
                circumstance = rng.choice(CIRCUMSTANCES[priority])
                opening = rng.choice(OPENINGS)
                body = problem if opening.endswith(", ") else sentence(problem)
                parts = [f"{opening}{body}.", circumstance]
                if rng.random() < 0.25:
                    parts = [circumstance, f"{sentence(problem)}."]
                ticket = " ".join(parts) + rng.choice(CLOSINGS)
                label = json.dumps({"category": category, "priority": priority})
                pairs.append((ticket, label))
    rng.shuffle(pairs)
    return pairs
