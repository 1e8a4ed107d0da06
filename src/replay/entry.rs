//! One logged step, protected against changes of its bytes in memory.

use super::bytes::bytes_of;
use super::checksum;
use super::gradient::{Encoding, expand};
use super::record::{Fault, Header, Kind, Record, Rule};
use crate::cpu::Parallel;
use xxhash_rust::xxh3::Xxh3;

pub use super::gradient::Dense as Stored;

/// Consecutive equal steps; more than one only without a gradient.
#[derive(Debug)]
pub(super) struct Entry {
    /// Number of the trainer's steps that the entry stands for.
    count: u64,
    /// The unit's own step count after the last of them.
    t: u64,
    rule: Rule,
    gradient: Gradient,
    /// Checksum of the fields above.
    seal: u64,
}

/// A gradient in the log.
#[derive(Debug)]
pub(super) struct Gradient {
    bytes: Bytes,
    /// Digest of the payload in the record.
    digest: u64,
}

#[derive(Debug)]
enum Bytes {
    Zero,
    Dense(Stored),
    Blocks(Vec<u8>),
}

impl Gradient {
    /// The gradient of a step that changes nothing.
    pub(super) fn nothing() -> Self {
        Self { bytes: Bytes::Zero, digest: checksum::of_hashes(&[]) }
    }

    /// Copies a record's gradient into its own memory.
    pub(super) fn store(record: &Record<'_>, pool: &dyn Parallel) -> Result<Self, Fault> {
        let (bytes, digest) = match record.header.encoding {
            _ if record.header.kind != Kind::Step => (Bytes::Zero, record.verify(pool)?),
            Encoding::Zero => (Bytes::Zero, record.verify(pool)?),
            Encoding::F32 => {
                let (values, digest) = record.copied_payload(pool)?;
                (Bytes::Dense(Stored::F32(values)), digest)
            }
            Encoding::Bf16 => {
                let (values, digest) = record.copied_payload(pool)?;
                (Bytes::Dense(Stored::Bf16(values)), digest)
            }
            Encoding::Blocks => {
                let (payload, digest) = record.copied_payload(pool)?;
                (Bytes::Blocks(payload), digest)
            }
        };
        Ok(Self { bytes, digest })
    }
}

/// Digest of a gradient in its current state.
pub(super) fn digest_of(stored: &Stored, pool: &dyn Parallel) -> u64 {
    match stored {
        Stored::F32(values) => checksum::digest(bytes_of(values), pool),
        Stored::Bf16(values) => checksum::digest(bytes_of(values), pool),
    }
}

/// An entry's part of a batch.
pub(super) struct Taken {
    /// The gradient; none for zeros.
    pub(super) gradient: Option<Stored>,
    /// Expected [`digest_of`] the gradient; none if it was compared already.
    pub(super) digest: Option<u64>,
}

impl Entry {
    /// Creates an entry of one step.
    pub(super) fn new(header: &Header, gradient: Gradient) -> Self {
        Self { count: 1, t: header.t, rule: header.rule, gradient, seal: 0 }.sealed()
    }

    fn sealed(mut self) -> Self {
        self.seal = self.sum();
        self
    }

    fn sum(&self) -> u64 {
        let mut state = Xxh3::new();
        for word in [self.count, self.t, self.gradient.digest] {
            state.update(&word.to_le_bytes());
        }
        self.rule.as_slice().iter().for_each(|number| state.update(&number.to_le_bytes()));
        state.digest()
    }

    /// Whether counts and numbers are unchanged.
    pub(super) fn is_intact(&self) -> bool {
        self.seal == self.sum()
    }

    /// Number of the trainer's steps that it stands for.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The numbers of each of these steps.
    pub(super) fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Bytes that it counts for.
    pub(super) fn bytes(&self) -> usize {
        cost(match &self.gradient.bytes {
            Bytes::Zero => 0,
            Bytes::Dense(Stored::F32(values)) => size_of_val(&values[..]),
            Bytes::Dense(Stored::Bf16(values)) => size_of_val(&values[..]),
            Bytes::Blocks(payload) => payload.len(),
        })
    }

    /// Counts the step of a header without a gradient if it equals the entry's steps; returns whether it did.
    pub(super) fn counts(&mut self, header: &Header, gradient: &Gradient) -> bool {
        let are_zero = matches!((&self.gradient.bytes, &gradient.bytes), (Bytes::Zero, Bytes::Zero));
        let same = are_zero && self.rule.same(&header.rule) && self.is_intact();
        if same {
            (self.count, self.t) = (self.count + 1, header.t);
            self.seal = self.sum();
        }
        same
    }

    /// Removes steps from the front; returns the unit's own step count after them. The entry's count may then be 0.
    pub(super) fn advance(&mut self, count: u64) -> u64 {
        self.count -= count;
        self.seal = self.sum();
        // Irrelevant if no step has numbers, and may then be less than the count.
        self.t.saturating_sub(self.count)
    }

    /// Takes the gradient of the only step that has one.
    pub(super) fn take(&mut self, elements: usize, pool: &dyn Parallel) -> Taken {
        let digest = self.gradient.digest;
        match &mut self.gradient.bytes {
            Bytes::Zero => Taken { gradient: None, digest: None },
            Bytes::Blocks(payload) => {
                let found = checksum::digest(payload, pool);
                if found != digest {
                    // The block table itself may have changed.
                    return Taken { gradient: Some(Stored::F32(vec![0.0; elements])), digest: Some(!found) };
                }
                Taken { gradient: Some(expand(payload, elements)), digest: None }
            }
            Bytes::Dense(stored) => {
                let stored = std::mem::replace(stored, Stored::F32(Vec::new()));
                Taken { gradient: Some(stored), digest: Some(digest) }
            }
        }
    }
}

/// Bytes that an entry counts for.
pub(super) fn cost(payload_bytes: usize) -> usize {
    payload_bytes + size_of::<Entry>()
}

#[cfg(test)]
mod tests {
    use super::super::gradient::{encode_gradient, most_payload_bytes};
    use super::super::log::Log;
    use super::super::record::HEADER_BYTES;
    use super::*;
    use crate::cpu::{self, Serial, SgdStep};

    const LEN: usize = 4096;

    fn record(values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + most_payload_bytes(LEN)];
        let gradient = cpu::Gradient::F32(values);
        let encoded = encode_gradient(gradient, LEN, false, &mut bytes[HEADER_BYTES..], &Serial);
        let rule = Rule::Sgd([0.0; SgdStep::LEN]);
        let header = Header {
            kind: Kind::Step,
            encoding: encoded.encoding,
            rule,
            unit: 1,
            step: 1,
            t: 1,
            elements: LEN,
            payload_bytes: encoded.payload_bytes,
        };
        bytes.truncate(HEADER_BYTES + encoded.payload_bytes);
        bytes[..HEADER_BYTES].copy_from_slice(&header.seal(encoded.digest));
        bytes
    }

    fn flip(entry: &mut Entry, place: usize) {
        match (&mut entry.gradient.bytes, place) {
            (_, 0) => entry.t ^= 4,
            (_, 1) => entry.rule = Rule::Sgd([0.25; SgdStep::LEN]),
            (_, 2) => entry.gradient.digest ^= 1,
            (Bytes::Dense(Stored::F32(values)), _) => values[77] = -values[77],
            (Bytes::Dense(Stored::Bf16(values)), _) => values[77] = -values[77],
            // The table, then a block.
            (Bytes::Blocks(payload), 3) => payload[0] ^= 1,
            (Bytes::Blocks(payload), _) => payload[99] ^= 1,
            (Bytes::Zero, _) => entry.count ^= 2,
        }
    }

    #[test]
    fn flipped_bit_of_an_entry_is_found_when_it_is_taken() {
        let narrow: Vec<f32> = (0..LEN).map(|i| 1.0 + (i % 64) as f32).collect();
        let wide: Vec<f32> = narrow.iter().map(|value| value * 1.000_01).collect();
        let mixed = [&wide[..LEN / 2], &[0.0; LEN / 2]].concat();
        for values in [&narrow, &wide, &mixed, &vec![0.0; LEN]] {
            for place in [None, Some(0), Some(1), Some(2), Some(3), Some(4)] {
                let mut log = Log::new(&[(1, LEN, 8)], 1 << 20).unwrap();
                let bytes = record(values);
                let record = Record::parse(&bytes).unwrap();
                let mut entry = Entry::new(&record.header, Gradient::store(&record, &Serial).unwrap());
                if let Some(place) = place {
                    flip(&mut entry, place);
                }
                log.start_with(entry);
                let batch = log.take(0, 8, 9, &Serial).unwrap();
                assert_eq!(batch.is_intact(&Serial), place.is_none(), "{place:?}");
            }
        }
    }
}
