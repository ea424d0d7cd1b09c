use ate_name::{Labels, MAX_SELECTOR_LABELS, check_label_key, check_label_value};
use serde::{Deserialize, Serialize};

use crate::FieldPath;
use crate::meta::check_labels;
use crate::path::Problems;

/// Chooses objects by their labels, as Kubernetes does: every pair and every expression must hold.
/// The empty selector chooses everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub match_labels: Labels,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirement {
    pub key: String,
    pub operator: Operator,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    In,
    /// Holds for an absent key too.
    NotIn,
    Exists,
    DoesNotExist,
}

impl LabelSelector {
    pub fn matches(&self, labels: &Labels) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.holds(labels))
    }

    pub(crate) fn check(&self, path: &FieldPath, problems: &mut Problems) {
        check_labels(&path.field("matchLabels"), &self.match_labels, problems);
        for (index, requirement) in self.match_expressions.iter().enumerate() {
            requirement.check(&path.field("matchExpressions").index(index), problems);
        }
    }
}

impl Requirement {
    fn holds(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            Operator::In => value.is_some_and(|value| self.values.contains(value)),
            Operator::NotIn => value.is_none_or(|value| !self.values.contains(value)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }

    fn check(&self, path: &FieldPath, problems: &mut Problems) {
        if let Err(error) = check_label_key(&self.key) {
            problems.add(path.field("key"), error.to_string());
        }
        let values = path.field("values");
        match (self.operator, self.values.is_empty()) {
            (Operator::In | Operator::NotIn, true) => {
                problems.add(values.clone(), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            (Operator::Exists | Operator::DoesNotExist, false) => {
                problems.add(values.clone(), "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
            }
            _ => {}
        }
        for (index, value) in self.values.iter().enumerate() {
            if let Err(error) = check_label_value(value) {
                problems.add(values.index(index), error.to_string());
            }
        }
    }
}

/// Checks an actor's own selector. The texts are part of the public API: clients compare them.
pub fn check_worker_selector(labels: &Labels) -> Result<(), String> {
    if labels.len() > MAX_SELECTOR_LABELS {
        let count = labels.len();
        return Err(format!(
            "worker_selector has {count} match_labels entries, exceeding the limit of {MAX_SELECTOR_LABELS}"
        ));
    }
    for (key, value) in labels {
        check_label_key(key).map_err(|error| format!("invalid worker_selector label key {key:?}: {error}"))?;
        check_label_value(value)
            .map_err(|error| format!("invalid worker_selector label value {value:?} for key {key:?}: {error}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    #[test]
    fn operators_follow_kubernetes_on_absent_keys() {
        let on = |operator, values: &[&str]| LabelSelector {
            match_expressions: vec![Requirement {
                key: "tier".into(),
                operator,
                values: values.iter().map(|value| value.to_string()).collect(),
            }],
            ..LabelSelector::default()
        };
        let (gold, tin, none) = (labels(&[("tier", "gold")]), labels(&[("tier", "tin")]), labels(&[]));
        for (selector, expected) in [
            (on(Operator::In, &["gold", "silver"]), [true, false, false]),
            (on(Operator::NotIn, &["gold", "silver"]), [false, true, true]),
            (on(Operator::Exists, &[]), [true, true, false]),
            (on(Operator::DoesNotExist, &[]), [false, false, true]),
            (LabelSelector::default(), [true, true, true]),
            (LabelSelector { match_labels: gold.clone(), ..LabelSelector::default() }, [true, false, false]),
        ] {
            assert_eq!([&gold, &tin, &none].map(|labels| selector.matches(labels)), expected, "{selector:?}");
        }
    }

    #[test]
    fn the_actors_selector_is_refused_in_the_words_of_the_public_api() {
        assert_eq!(check_worker_selector(&labels(&[("workload", "counter")])), Ok(()));
        let many: Labels = (0..11).map(|n| (format!("k{n}"), String::new())).collect();
        assert_eq!(
            check_worker_selector(&many).unwrap_err(),
            "worker_selector has 11 match_labels entries, exceeding the limit of 10"
        );
        assert_eq!(
            check_worker_selector(&labels(&[("not a key", "x")])).unwrap_err(),
            "invalid worker_selector label key \"not a key\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        );
        assert_eq!(
            check_worker_selector(&labels(&[("a", "not a value")])).unwrap_err(),
            "invalid worker_selector label value \"not a value\" for key \"a\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        );
    }

    fn any_labels() -> impl Strategy<Value = Labels> {
        btree_map("[abc]", "[xyz]", 0..3)
    }

    fn any_requirement() -> impl Strategy<Value = (String, Vec<String>)> {
        ("[abc]", vec("[xyz]", 1..3))
    }

    proptest! {
        #[test]
        fn an_operator_and_its_opposite_never_agree((key, values) in any_requirement(), labels in any_labels()) {
            let holds = |operator, values: &[String]| {
                Requirement { key: key.clone(), operator, values: values.to_vec() }.holds(&labels)
            };
            prop_assert_ne!(holds(Operator::In, &values), holds(Operator::NotIn, &values));
            prop_assert_ne!(holds(Operator::Exists, &[]), holds(Operator::DoesNotExist, &[]));
        }

        #[test]
        fn a_pair_is_the_same_as_in_with_one_value(pairs in any_labels(), labels in any_labels()) {
            let match_expressions = pairs
                .iter()
                .map(|(key, value)| Requirement {
                    key: key.clone(),
                    operator: Operator::In,
                    values: vec![value.clone()],
                })
                .collect();
            let by_expression = LabelSelector { match_expressions, ..LabelSelector::default() };
            let by_pair = LabelSelector { match_labels: pairs, ..LabelSelector::default() };
            prop_assert_eq!(by_pair.matches(&labels), by_expression.matches(&labels));
        }
    }
}
