//! Values that processes make known under names, and the last words about failures, which are such values.

use super::{Hub, MOST_WORDS, OPENED, ToHost, WORDS};

impl Hub {
    pub(super) fn set(&mut self, host: usize, key: String, value: Vec<u8>) -> Result<(), &'static str> {
        if let Some((teller, _)) = key.strip_prefix(WORDS).and_then(|key| key.split_once('/')) {
            fail_if!(teller.parse() != Ok(host), "words of another process");
        }
        self.keep_few_words(&key);
        if key.strip_prefix(OPENED).is_some_and(|rank| rank.parse() == Ok(host)) {
            self.opened.insert(host);
        }
        for (asker, _) in self.asked.remove(&key).unwrap_or_default() {
            self.out.push((asker, ToHost::Value { key: key.clone(), value: value.clone() }));
        }
        self.values.insert(key, value);
        Ok(())
    }

    pub(super) fn get(&mut self, host: usize, key: String, waits: bool) {
        self.keep_few_words(&key);
        match self.values.get(&key) {
            Some(value) => self.out.push((host, ToHost::Value { value: value.clone(), key })),
            None => self.asked.entry(key).or_default().push((host, waits)),
        }
    }

    fn keep_few_words(&mut self, key: &str) {
        if !key.starts_with(WORDS) || self.words.iter().any(|known| known == key) {
            return;
        }
        self.words.push_back(key.to_owned());
        if self.words.len() > MOST_WORDS
            && let Some(oldest) = self.words.pop_front()
        {
            self.values.remove(&oldest);
            self.asked.remove(&oldest);
        }
    }
}
