"""An embedded synthetic catalogue and its shoppers, drawn from a seed.

It needs no download, has the schema of real data, and its best possible
ranking is computable. The structure it holds:

- *Catalogue.* Departments (hair, skin, make-up, ...) hold one or two
  *routines*, each a directed cycle of three to five leaf categories (shampoo ->
  conditioner -> hair mask -> ...; after the last step the first runs out and is
  bought anew). Brands span categories; an item is one brand's product in one
  leaf. Popularity is a power law over all items.
- *Shoppers.* Every shopper has a hidden pair of favourite brands, starts in any
  leaf, and never buys an item twice. The next purchase most often follows the
  routine of the previous one, sometimes skips a step, sometimes moves
  elsewhere, and is sometimes noise.

With i an item, c(i) its leaf, b(i) its brand, pop(i) its popularity, h the
history, z the hidden brand pair, R the transition matrix between leaves (its
last row is where shoppers start), lambda the loyalty and eps the noise:

    s(i | h, z) = R[c(h_last), c(i)] pop(i) lambda^[b(i) in z]     i not in h
    p(i | h, z) = (1 - eps) s(i | h, z) / sum_j s(j | h, z)
                + eps pop(i) / sum_{j not in h} pop(j)

and the oracle, which knows the process but not the shopper's z, is

    p(i | h) = sum_z p(z | h) p(i | h, z),
    p(z | h) ~ p(z) prod_t p(h_t | h_<t, z),    p(z) uniform over pairs.

A co-purchase retriever sees leaves and brands that go together, but neither the
step of the routine that comes next nor the brands of the whole history; a
re-ranker that reads the history in order does. With the default configuration
and seeds 0 to 4, on the test users whose target is among the ten candidates:

    retriever                                targets     Recall@1
                                             in the ten  its order   oracle
    symmetric (backward=1, recency_decay=.7)  .46-.48    .33-.36    .67-.71
    `cooccurrence.default_config()`           .51-.53    .39-.41    .62-.67

No ranker can beat the oracle's order in expectation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from dgr2_jax.data import interactions

# Department -> routines; a routine is a cycle of (leaf category, product name,
# size, base price).
ROUTINES = {
    'Hair Care': (
        (('Shampoos', 'Shampoo', '250 ml', 8.0),
         ('Conditioners', 'Conditioner', '250 ml', 9.0),
         ('Hair Masks', 'Hair Mask', '200 ml', 14.0),
         ('Styling Creams', 'Styling Cream', '100 ml', 12.0)),
        (('Hair Color', 'Hair Color', '60 ml', 7.0),
         ('Color Protectors', 'Color Protector', '150 ml', 13.0),
         ('Hair Oils', 'Hair Oil', '50 ml', 15.0)),
    ),
    'Skin Care': (
        (('Cleansers', 'Cleanser', '150 ml', 11.0),
         ('Toners', 'Toner', '200 ml', 12.0),
         ('Serums', 'Serum', '30 ml', 24.0),
         ('Moisturizers', 'Moisturizer', '50 ml', 19.0),
         ('Sunscreens', 'Sunscreen', '75 ml', 16.0)),
        (('Exfoliators', 'Exfoliator', '100 ml', 13.0),
         ('Face Masks', 'Face Mask', '75 ml', 14.0),
         ('Eye Creams', 'Eye Cream', '15 ml', 22.0)),
    ),
    'Makeup': (
        (('Primers', 'Primer', '30 ml', 15.0),
         ('Foundations', 'Foundation', '30 ml', 18.0),
         ('Powders', 'Powder', '10 g', 14.0),
         ('Blushes', 'Blush', '6 g', 12.0)),
        (('Eyeshadows', 'Eyeshadow', '8 g', 16.0),
         ('Eyeliners', 'Eyeliner', '1 g', 9.0),
         ('Mascaras', 'Mascara', '10 ml', 11.0)),
    ),
    'Nails': (
        (('Base Coats', 'Base Coat', '12 ml', 6.0),
         ('Nail Polish', 'Nail Polish', '12 ml', 7.0),
         ('Top Coats', 'Top Coat', '12 ml', 7.0)),
    ),
    'Bath': (
        (('Body Washes', 'Body Wash', '300 ml', 7.0),
         ('Body Scrubs', 'Body Scrub', '200 ml', 11.0),
         ('Body Lotions', 'Body Lotion', '250 ml', 10.0)),
    ),
    'Fragrance': (
        (('Perfumes', 'Perfume', '50 ml', 42.0),
         ('Body Mists', 'Body Mist', '100 ml', 14.0),
         ('Deodorants', 'Deodorant', '75 ml', 8.0)),
    ),
}
ROOT = 'Beauty'

BRANDS = (
    'Lumea', 'Botanica', 'Verdana', 'Solenne', 'Nordlys', 'Aquarell', 'Mirabel',
    'Ostara', 'Pureza', 'Calisto', 'Elowen', 'Tamarind', 'Zephyra', 'Rosmarin',
    'Kestrel', 'Ondine', 'Maravel', 'Fjella', 'Juniper', 'Seraphine', 'Bellamy',
    'Coralie', 'Halcyon', 'Ivorine')
LINES = (
    'Repair', 'Gentle', 'Daily', 'Radiant', 'Pure', 'Velvet', 'Fresh',
    'Botanic', 'Classic', 'Intense', 'Silk', 'Hydra')


@dataclasses.dataclass(frozen=True)
class EmbeddedConfig:
  """The generative process; the defaults are the documented catalogue.

  Attributes:
    seed: of the catalogue and the shoppers.
    num_users: shoppers.
    num_items: items, spread evenly over the leaf categories.
    num_brands: brands, at most `len(BRANDS)`.
    min_length: shortest purchase sequence.
    max_length: longest purchase sequence; lengths are uniform in between.
    routine: weight in R of the routine's next leaf. Brands and popularity
      shift it: about .63 of the steps follow the routine by default.
    skip: weight in R of the leaf after that; all leaves share the rest.
    loyalty: lambda, how many times likelier a favourite brand's item is.
    zipf: exponent of the popularity power law.
    noise: eps, probability of a purchase by popularity alone.
  """
  seed: int = 0
  num_users: int = 3000
  num_items: int = 300
  num_brands: int = 16
  min_length: int = 5
  max_length: int = 14
  routine: float = 0.75
  skip: float = 0.1
  loyalty: float = 50.0
  zipf: float = 0.5
  noise: float = 0.03

  def __post_init__(self):
    leaves = sum(len(r) for rs in ROUTINES.values() for r in rs)
    checks = (
        ('num_users', self.num_users >= 1, 'at least 1'),
        ('num_items', self.num_items >= max(leaves, 2 * self.max_length),
         f'at least {leaves} and twice max_length'),
        ('num_items', self.num_items <= leaves * len(BRANDS),
         f'at most {leaves * len(BRANDS)}'),
        ('num_brands', 2 <= self.num_brands <= len(BRANDS),
         f'between 2 and {len(BRANDS)}'),
        ('min_length', 3 <= self.min_length <= self.max_length,
         'at least 3 and at most max_length'),
        ('routine', self.routine >= 0 and self.skip >= 0
         and self.routine + self.skip < 1, 'routine + skip below 1'),
        ('loyalty', self.loyalty >= 1, 'at least 1'),
        ('zipf', self.zipf >= 0, 'at least 0'),
        ('noise', 0 <= self.noise < 1, 'in [0, 1)'),
    )
    for field, good, expected in checks:
      if not good:
        raise ValueError(
            f'data.embedded.{field} is {getattr(self, field)}: expected '
            f'{expected}.')


@dataclasses.dataclass(frozen=True)
class _World:
  """The drawn catalogue in arrays (I items, K leaves, Z brand pairs)."""
  items: tuple[interactions.Item, ...]
  leaf: np.ndarray        # int32 [I]
  popularity: np.ndarray  # float64 [I], sums to 1
  transition: np.ndarray  # float64 [K + 1, K], row K is the start
  boost: np.ndarray       # float64 [Z, I], lambda or 1


def _config(config: EmbeddedConfig | Mapping) -> EmbeddedConfig:
  if isinstance(config, EmbeddedConfig):
    return config
  try:
    return EmbeddedConfig(**dict(config))
  except TypeError as e:
    raise ValueError(f'data.embedded: {e}') from e


def _transition(config: EmbeddedConfig) -> np.ndarray:
  """The leaf-to-leaf matrix R, float64 [K + 1, K], rows summing to one."""
  routines = [r for rs in ROUTINES.values() for r in rs]
  num_leaves = sum(len(r) for r in routines)
  elsewhere = 1 - config.routine - config.skip
  transition = np.full((num_leaves + 1, num_leaves), elsewhere / num_leaves)
  first = 0
  for routine in routines:
    n = len(routine)
    for step in range(n):
      transition[first + step, first + (step + 1) % n] += config.routine
      transition[first + step, first + (step + 2) % n] += config.skip
    first += n
  transition[num_leaves] = 1 / num_leaves
  return transition


def _world(config: EmbeddedConfig) -> _World:
  """Draws the catalogue; a function of the configuration alone."""
  rng = np.random.default_rng([config.seed, 0])
  leaves = [(department, *leaf) for department, rs in ROUTINES.items()
            for routine in rs for leaf in routine]
  rows = []  # (leaf, brand, line)
  for leaf in range(len(leaves)):
    count = (config.num_items // len(leaves)
             + (leaf < config.num_items % len(leaves)))
    # Every brand once before any brand twice; a second one has another line.
    brands = np.concatenate([
        rng.permutation(config.num_brands)
        for _ in range(-(-count // config.num_brands))])[:count]
    offset = rng.integers(len(LINES), size=config.num_brands)
    seen = np.zeros(config.num_brands, int)
    for brand in brands:
      rows.append((leaf, brand, (offset[brand] + seen[brand]) % len(LINES)))
      seen[brand] += 1
  # Shuffled, so that an item's index says nothing about its leaf.
  rows = [rows[i] for i in rng.permutation(len(rows))]
  premium = rng.uniform(0.6, 1.8, config.num_brands)
  items = []
  for i, (leaf, brand, line) in enumerate(rows):
    department, category, product, size, price = leaves[leaf]
    items.append(interactions.Item(
        item_id=f'E{i:04d}',
        title=f'{BRANDS[brand]} {LINES[line]} {product} {size}',
        categories=(ROOT, department, category),
        brand=BRANDS[brand],
        price=round(float(price * premium[brand])) + 0.99))
  popularity = (1.0 + rng.permutation(len(rows))) ** -config.zipf
  brand = np.array([row[1] for row in rows])
  pairs = np.array(list(itertools.combinations(range(config.num_brands), 2)))
  favourite = (brand == pairs[:, :1]) | (brand == pairs[:, 1:])  # [Z, I]
  return _World(
      items=tuple(items),
      leaf=np.array([row[0] for row in rows], np.int32),
      popularity=popularity / popularity.sum(),
      transition=_transition(config),
      boost=np.where(favourite, config.loyalty, 1.0))


def generate(
    config: EmbeddedConfig | Mapping) -> interactions.Dataset:
  """Draws the catalogue and its shoppers.

  Args:
    config: an `EmbeddedConfig`, or a mapping of (some of) its fields.

  Returns:
    The dataset; equal configurations give equal datasets.

  Raises:
    ValueError: a field is unknown or out of range; the message names it.
  """
  config = _config(config)
  world = _world(config)
  rng = np.random.default_rng([config.seed, 1])
  num_users = config.num_users
  lengths = rng.integers(
      config.min_length, config.max_length + 1, size=num_users)
  boost = world.boost[rng.integers(len(world.boost), size=num_users)]  # [U, I]
  available = np.ones((num_users, config.num_items))
  last = np.full(num_users, len(world.transition) - 1)  # the start row
  bought = np.zeros((num_users, config.max_length), np.int32)
  everyone = np.arange(num_users)
  for step in range(config.max_length):
    noise = available * world.popularity  # [U, I]
    score = noise * boost * world.transition[:, world.leaf][last]
    probability = (
        (1 - config.noise) * score / score.sum(1, keepdims=True)
        + config.noise * noise / noise.sum(1, keepdims=True))
    # Inverse of the cumulative distribution; argmax finds the first True.
    drawn = np.argmax(
        probability.cumsum(1) > rng.random((num_users, 1))
        * probability.sum(1, keepdims=True), axis=1)
    bought[:, step] = drawn
    available[everyone, drawn] = 0
    last = world.leaf[drawn]
  return interactions.Dataset(
      name='embedded',
      items=world.items,
      users=tuple(f'U{u:05d}' for u in range(num_users)),
      sequences=tuple(b[:n].copy() for b, n in zip(bought, lengths)))


def oracle_probabilities(
    config: EmbeddedConfig | Mapping,
    dataset: interactions.Dataset,
    histories: Sequence[np.ndarray]) -> np.ndarray:
  """The exact p(next item | history) of the module docstring.

  Args:
    config: what `dataset` was generated from.
    dataset: the generated dataset, possibly with items filtered out.
    histories: R arrays of item indices, oldest first, each complete from the
      shopper's first purchase; an empty one is a shopper who starts.

  Returns:
    float64 [R, num_items]; zero for items in the history. Rows sum to one
    unless `dataset` lacks items of the generated catalogue.

  Raises:
    ValueError: the dataset holds an item that the configuration didn't make.
  """
  config = _config(config)
  world = _world(config)
  index = {item: i for i, item in enumerate(world.items)}
  try:
    known = np.array([index[item] for item in dataset.items])
  except KeyError as e:
    raise ValueError(
        f'{e.args[0]} is not an item of this configuration.') from e
  lengths = np.array([len(h) for h in histories], int)
  num_rows, longest = len(histories), int(lengths.max(initial=0))
  history = np.zeros((num_rows, longest), int)  # [R, T]
  for row, h in enumerate(histories):
    history[row, :len(h)] = known[np.asarray(h, int)]

  # reach[c, i] = R[c, c(i)] pop(i), and its sum under each pair z.
  reach = world.transition[:, world.leaf] * world.popularity  # [K + 1, I]
  total = reach @ world.boost.T  # [K + 1, Z]
  start = len(reach) - 1
  boost = world.boost.T  # [I, Z]

  def normalisers(last, step):
    """Sums over items not among the first `step`: [rows, Z], [rows, 1]."""
    scores, noise = total[last], np.ones((len(last), 1))
    for t in range(step):
      item = rows[:, t]
      scores = scores - reach[last, item][:, None] * boost[item]
      noise = noise - world.popularity[item][:, None]
    return scores, noise

  result = np.zeros((num_rows, len(world.items)))
  for length in np.unique(lengths):
    chosen = np.flatnonzero(lengths == length)
    rows = history[chosen]
    # log p(z | h) up to a constant, [rows, Z].
    posterior = np.zeros((len(chosen), len(world.boost)))
    last = np.full(len(chosen), start)
    for step in range(length):
      item = rows[:, step]
      scores, noise = normalisers(last, step)
      posterior += np.log(
          (1 - config.noise) * reach[last, item][:, None] * boost[item] / scores
          + config.noise * world.popularity[item][:, None] / noise)
      last = world.leaf[item]
    posterior = np.exp(posterior - posterior.max(1, keepdims=True))
    posterior /= posterior.sum(1, keepdims=True)
    scores, noise = normalisers(last, length)
    result[chosen] = (
        (1 - config.noise) * reach[last] * ((posterior / scores) @ world.boost)
        + config.noise * world.popularity / noise)
    result[chosen[:, None], rows[:, :length]] = 0
  return result[:, known]
