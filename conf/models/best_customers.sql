SELECT customer, orders, total
FROM {{ ref('customer_totals') }}
ORDER BY total DESC, customer
LIMIT 10
