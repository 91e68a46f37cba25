"""What EC2 refuses in the network interfaces of a launch template (or takes, and then EFA does not work)."""

from collections import Counter
from collections.abc import Callable, Iterator

from config.finding import Finding
from config.rules.node_group import EFA_TYPES, NodeGroup
from config.rules.shapes import is_late

_EFA_TYPES_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"
_EFA_NODES = "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"
_INTERFACE = (
    "https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/"
    "aws-properties-ec2-launchtemplate-networkinterface.html"
)
_CARD_LIMIT = "https://github.com/eksctl-io/eksctl/issues/7520"
_B300 = "https://github.com/aws/aws-parallelcluster/issues/7143"
_PUBLIC = "https://github.com/terraform-aws-modules/terraform-aws-eks/issues/3533"

# Whatever gives an interface an address: an efa-only interface has no IP stack.
_ADDRESS_FIELDS = (
    "AssociatePublicIpAddress",
    "AssociateCarrierIpAddress",
    "PrivateIpAddress",
    "PrivateIpAddresses",
    "SecondaryPrivateIpAddressCount",
    "Ipv4PrefixCount",
    "Ipv4Prefixes",
    "Ipv6AddressCount",
    "Ipv6Addresses",
    "Ipv6PrefixCount",
    "Ipv6Prefixes",
)


def _slots(group: NodeGroup) -> Iterator[tuple[str, int, int, str]]:
    """(path, card, device, type) of every interface that is known; EC2's defaults where nothing is said."""
    for number, interface in enumerate(group.interfaces):
        card, device = interface.get("NetworkCardIndex", 0), interface.get("DeviceIndex", 0)
        kind = interface.get("InterfaceType", "interface")
        if not any(is_late(value) for value in (card, device, kind)):
            yield group.in_template(f"NetworkInterfaces[{number}]"), card, device, kind


def known_type(group: NodeGroup) -> Iterator[Finding]:
    """InterfaceType is a closed set, which no offline validator knows."""
    for path, _, _, kind in _slots(group):
        if kind not in ("interface", *EFA_TYPES):
            yield Finding(
                f"{path}.InterfaceType",
                kind,
                "EC2 knows interface, efa and efa-only",
                "write efa-only for EFA without an address, interface for the primary",
                _INTERFACE,
            )


def one_primary(group: NodeGroup) -> Iterator[Finding]:
    """The instance boots from card 0, device 0, which needs an address."""
    if not group.interfaces or not group.interfaces_are_known:
        return
    primaries = [kind for _, card, device, kind in _slots(group) if (card, device) == (0, 0)]
    where = group.in_template("NetworkInterfaces")
    if not primaries:
        yield Finding(
            where,
            "none at card 0, device 0",
            "exactly one interface is the primary: network card 0, device 0",
            "add {NetworkCardIndex: 0, DeviceIndex: 0, InterfaceType: interface}",
            _EFA_TYPES_GUIDE,
        )
    if "efa-only" in primaries:
        yield Finding(
            where,
            "efa-only at card 0, device 0",
            "the primary interface carries the node's address and can't be efa-only",
            "make card 0, device 0 an interface; put efa-only at card 0, device 1 where that card has EFA",
            _EFA_TYPES_GUIDE,
        )


def unique_slots(group: NodeGroup) -> Iterator[Finding]:
    """No two interfaces in the same place."""
    for (card, device), count in Counter((card, device) for _, card, device, _ in _slots(group)).items():
        if count > 1:
            yield Finding(
                group.in_template("NetworkInterfaces"),
                f"{count} at card {card}, device {device}",
                "each pair of network card and device index is used once",
                "give every interface a card or a device index of its own",
                _INTERFACE,
            )


def card_limits(group: NodeGroup) -> Iterator[Finding]:
    """Cards that the type has, and places that a card has: a p5 card has devices 0 and 1 only."""
    instance = group.instance
    if instance is None:
        return
    for path, card, device, _ in _slots(group):
        if card >= instance.network_card_count:
            yield Finding(
                f"{path}.NetworkCardIndex",
                str(card),
                f"{instance.name} has network cards 0 to {instance.network_card_count - 1}",
                "take the layout of config/instances.py",
                _EFA_TYPES_GUIDE,
            )
        if device >= instance.max_interfaces_per_card:
            yield Finding(
                f"{path}.DeviceIndex",
                str(device),
                f"a card of {instance.name} takes device indexes 0 to {instance.max_interfaces_per_card - 1}",
                "use device 0 on cards 1 and up and device 1 beside the primary; the card's index is no device index",
                _CARD_LIMIT,
            )


def one_efa_per_card(group: NodeGroup) -> Iterator[Finding]:
    """One EFA device per network card, and none on a card that has no EFA."""
    cards = Counter(card for _, card, _, kind in _slots(group) if kind in EFA_TYPES)
    for card, count in cards.items():
        if count > 1:
            yield Finding(
                group.in_template("NetworkInterfaces"),
                f"{count} EFA devices on card {card}",
                "a network card has one EFA device",
                "keep one of them; make the other an interface or move it to its own card",
                _EFA_NODES,
            )
    instance = group.instance
    if instance is not None and not instance.primary_card_has_efa and 0 in cards:
        yield Finding(
            group.in_template("NetworkInterfaces"),
            "EFA on card 0",
            f"card 0 of {instance.name} is ENA only",
            f"put EFA on cards 1 to {instance.network_card_count - 1}",
            _B300,
        )


def every_efa_device(group: NodeGroup) -> Iterator[Finding]:
    """The pods ask for all of a node's EFA devices: with fewer they stay Pending."""
    instance = group.instance
    count = sum(kind in EFA_TYPES for _, _, _, kind in _slots(group))
    if instance is not None and group.interfaces_are_known and count != instance.efa_count:
        yield Finding(
            group.in_template("NetworkInterfaces"),
            f"{count} EFA interfaces",
            f"{instance.name} has {instance.efa_count} EFA devices, and a worker pod asks for all of them",
            "take the layout of config/instances.py",
            _EFA_TYPES_GUIDE,
        )


def no_address_on_efa_only(group: NodeGroup) -> Iterator[Finding]:
    """EC2 answers InvalidParameterValue to any address on an efa-only interface."""
    for number, interface in enumerate(group.interfaces):
        if interface.get("InterfaceType") != "efa-only":
            continue
        for field in _ADDRESS_FIELDS:
            if interface.get(field):
                yield Finding(
                    group.in_template(f"NetworkInterfaces[{number}].{field}"),
                    str(interface[field]),
                    "an efa-only interface takes no IP address",
                    f"remove {field}, or make it an interface of type efa",
                    _INTERFACE,
                )


def no_public_address(group: NodeGroup) -> Iterator[Finding]:
    """A public address is only given to an instance with a single interface."""
    public = [number for number, item in enumerate(group.interfaces) if item.get("AssociatePublicIpAddress") is True]
    if public and len(group.interfaces) > 1:
        yield Finding(
            group.in_template(f"NetworkInterfaces[{public[0]}].AssociatePublicIpAddress"),
            "True",
            f"with {len(group.interfaces)} network interfaces an instance gets no public address",
            "remove it, and put the nodes in a private subnet with a NAT gateway or endpoints",
            _PUBLIC,
        )


RULES: tuple[Callable[[NodeGroup], Iterator[Finding]], ...] = (
    known_type,
    one_primary,
    unique_slots,
    card_limits,
    one_efa_per_card,
    every_efa_device,
    no_address_on_efa_only,
    no_public_address,
)
